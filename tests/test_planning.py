"""How long a run is: minutes to steps."""

from dataclasses import replace

import pytest
import torch
from toy import build_trainer

from asi.planning import REHEARSED_PART, planned_steps, rehearsing


def test_rehearsal_leaves_no_trace(toy_config, beir, encoder_folder):
    trainer = build_trainer(toy_config, beir, encoder_folder, torch.float32)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    with rehearsing(trainer, 60) as rehearsal:
        assert rehearsal.seconds_of_a_step() > 0
        assert rehearsal.once > 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights().items())
    assert not trainer.optimizer.state_dict()["state"]


def test_a_step_takes_what_its_kinds_take_and_none_is_timed_twice(toy_config, beir, encoder_folder, monkeypatch):
    """Steps for docids take longer than those between them, and a run may have more of these than was thought."""
    train = replace(toy_config.train, docid_every=1, start_heads=0.3, freeze_docids=1.0)
    trainer = build_trainer(replace(toy_config, train=train), beir, encoder_folder, torch.float32)
    timed = []

    def takes(rehearsal, step):
        timed.append(step)
        return {"docids": 3.0, "ranking": 1.0}[trainer.objective.kind_of_step(step)] + 50.0 * (len(timed) == 1)

    monkeypatch.setattr("asi.planning.Rehearsal.timed_step", takes)
    with rehearsing(trainer, 600) as rehearsal:
        assert rehearsal.seconds_of_a_step() == pytest.approx(3.0)
        assert rehearsal.once == pytest.approx(50.0)
        first = len(timed)
        assert rehearsal.seconds_of_a_step() == pytest.approx(3.0)
        assert len(timed) == first
        monkeypatch.setattr(trainer.objective, "kind_of_step", lambda step: "ranking" if step % 3 else "docids")
        assert rehearsal.seconds_of_a_step() == pytest.approx((3.0 + 2 * 1.0) / 3)
        assert REHEARSED_PART % 3 == 0
        assert all(step % 3 for step in timed[first:])
        assert rehearsal.once == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("spent", "steps", "warned"),
    [(0, 590, False), (300, 290, False), (500, 200, True), (3000, 200, True)],  # of 600 seconds; a step takes one
)
def test_steps_have_a_third_of_the_minutes_however_long_encoding_took(
    toy_config, beir, encoder_folder, monkeypatch, spent, steps, warned
):
    trainer = build_trainer(toy_config, beir, encoder_folder, torch.float32)

    def one_second(rehearsal):
        rehearsal.once = 10.0  # seconds of what comes once
        return 1.0

    monkeypatch.setattr("asi.planning.Rehearsal.seconds_of_a_step", one_second)
    monkeypatch.setattr("asi.planning.time.monotonic", lambda: 1000.0 + spent)
    warnings = []
    config = replace(toy_config.train, steps=None, minutes=10.0)
    assert planned_steps(trainer, config, 1000.0, warnings.append) == steps
    assert bool(warnings) == warned


def test_a_run_so_long_that_its_steps_are_others_is_planned_by_these(toy_config, beir, encoder_folder, monkeypatch):
    """Steps for docids take longer than those between them, which a long run has more of."""
    trainer = build_trainer(toy_config, beir, encoder_folder, torch.float32)
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr("asi.planning.Rehearsal.seconds_of_a_step", lambda rehearsal: next(seconds))
    config = replace(toy_config.train, steps=None, minutes=0.5)
    assert planned_steps(trainer, config, None) == 30  # rehearsed once
    seconds = iter([1.0, 0.5])
    assert planned_steps(trainer, replace(config, minutes=100.0), None) == 12000
