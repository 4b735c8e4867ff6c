"""The promises of the training loop: chunks change nothing, processes change nothing, interruptions change nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toy import build_trainer

from asi.batches import DOCUMENT, QUERY, TrainingPairs
from asi.config import to_toml
from asi.datasets import open_dataset
from asi.errors import Interrupted
from asi.features import encode
from asi.objective import LEAST_OF_A_ROUND, feature_dropout
from asi.quantiser import fit_quantiser
from asi.run import Silence, train
from asi.training import lr_share, residual_group

ASI = [sys.executable, "-c", "from asi.cli import main; main()"]


def gradients(trainer, step, steps):
    """The gradient of a step before clipping."""
    phase = trainer.objective.enter(step / steps)
    batch = trainer.objective.pairs.at(step)
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.joint_backward(batch, phase)
    return {name: p.grad.clone() for name, p in trainer.objective.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen_layers", [0, 1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunks_give_the_gradient_of_the_whole_batch(toy_config, beir, encoder_folder, frozen_layers, chunk):
    loss = replace(
        toy_config.loss,
        contrastive=0.2,
        reverse=0.2,
        match=0.3,
        balance=0.1,
        straight_through_weight=1.0,
        docid_gradient=0.5,
    )
    config = replace(toy_config, model=replace(toy_config.model, frozen_layers=frozen_layers), loss=loss)
    whole = gradients(build_trainer(config, beir, encoder_folder), 6, 10)
    chunked_config = replace(config, train=replace(config.train, chunk=chunk))
    chunked = gradients(build_trainer(chunked_config, beir, encoder_folder), 6, 10)
    assert whole.keys() == chunked.keys()
    for name, gradient in whole.items():
        assert torch.allclose(gradient, chunked[name], rtol=1e-5, atol=1e-9), name


@pytest.mark.parametrize(("frozen_layers", "between"), [(2, {"adapter", "matcher"}), (1, {"adapter", "encoder"})])
def test_what_learns_in_which_step(toy_config, beir, encoder_folder, frozen_layers, between):
    """Tokens learn between the steps for docids too, if their states need no encoding; at first only vectors do."""
    train = replace(toy_config.train, start_heads=0.2, docid_every=3, chunk=7)
    model = replace(toy_config.model, frozen_layers=frozen_layers)
    config = replace(toy_config, model=model, train=train)

    def learning(chunk, step):
        trainer = build_trainer(replace(config, train=replace(train, chunk=chunk)), beir, encoder_folder)
        return gradients(trainer, step, 20)

    def parts(step):
        return {name.partition(".")[0] for name in learning(7, step)}

    assert parts(0) == parts(2) == between - {"matcher"}
    assert parts(12) == between
    assert parts(14) == between | {"matcher", "heads", "decoder"}
    whole, chunked = learning(1024, 12), learning(7, 12)
    assert all(torch.allclose(gradient, chunked[name], rtol=1e-5, atol=1e-9) for name, gradient in whole.items())


def test_straight_through_schedule(toy_config, beir, encoder_folder):
    objective = build_trainer(toy_config, beir, encoder_folder).objective
    weight = toy_config.loss.straight_through_weight
    at = {progress: objective.enter(progress) for progress in (0.0, 0.29, 0.4, 0.6, 0.91)}
    assert at[0.0].straight_through == at[0.29].straight_through == 0
    assert at[0.4].straight_through == pytest.approx(weight / 2)
    assert at[0.6].straight_through == pytest.approx(weight)
    assert [phase.frozen for phase in at.values()] == [False, False, False, False, True]


def test_without_reparameterization_the_heads_get_no_gradient_from_generation(toy_config, beir, encoder_folder):
    loss = replace(toy_config.loss, contrastive=0, reverse=0, vector=0, match=0, balance=0)
    with_it = gradients(build_trainer(replace(toy_config, loss=loss), beir, encoder_folder), 6, 10)
    off = replace(toy_config, loss=replace(loss, straight_through=False))
    without = gradients(build_trainer(off, beir, encoder_folder), 6, 10)
    assert with_it["heads.linear.weight"].abs().sum() > 0
    assert "heads.linear.weight" not in without


def test_frozen_docids_do_not_move(toy_config, beir, encoder_folder):
    trainer = build_trainer(toy_config, beir, encoder_folder, torch.float32)
    rows = np.arange(48)
    trainer.step(8, 10)
    before = trainer.objective.docids(rows)
    decoder = trainer.objective.model.decoder.outputs.detach().clone()
    trainer.step(9, 10)
    assert (trainer.objective.docids(rows) == before).all()
    assert not torch.equal(decoder, trainer.objective.model.decoder.outputs)


def test_docids_learn_for_some_rounds_through_the_pairs_and_no_more(toy_config, beir, encoder_folder, monkeypatch):
    monkeypatch.setattr("asi.objective.LEAST_STEPS", 1)
    train = replace(toy_config.train, start_heads=0.3, docid_every=2, docid_rounds=5.0, decoder_rounds=10.0)
    objective = build_trainer(replace(toy_config, train=train), beir, encoder_folder).objective
    most = 5 * objective.pairs.steps_per_epoch

    def counted(steps):
        objective.plan(steps)
        frozen = [objective.enter(step / steps).frozen for step in range(steps)]
        learning = range(round(0.3 * steps), steps - sum(frozen))
        return sum(objective.kind_of_step(step) == "docids" for step in learning), sum(frozen)

    assert counted(40) == (12, 4)  # of the 24 steps before the docids are frozen every second one
    assert most < 100
    for steps in (20 * most, 50 * most):
        assert counted(steps) == (most, 2 * most)


def test_one_round_for_docids_has_some_steps_and_heads_start_however_short_the_run(toy_config, beir, encoder_folder):
    train = replace(toy_config.train, start_heads=0.95, docid_every=1, docid_rounds=1.0, freeze_docids=1.0)
    objective = build_trainer(replace(toy_config, train=train), beir, encoder_folder).objective
    assert objective.pairs.steps_per_epoch < LEAST_OF_A_ROUND

    def counted(steps):
        objective.plan(steps)
        return sum(objective.kind_of_step(step) == "docids" for step in range(round(0.95 * steps), steps))

    assert counted(10_000) == LEAST_OF_A_ROUND
    assert counted(200) == 10
    objective.plan(3)
    objective.enter(1 / 3)
    assert objective.model.heads.untouched
    objective.enter(2 / 3)
    assert not objective.model.heads.untouched


def test_learning_rate_warms_up_and_decays():
    shares = [lr_share(step, 100, 10) for step in range(100)]
    assert shares[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert shares == sorted(shares[:10]) + sorted(shares[10:], reverse=True)
    assert shares[-1] < 0.06


def test_only_the_residual_layer_is_drawn_back(toy_config, beir, encoder_folder):
    decay = 4.0 * 126 / 10_000  # the toy corpus has 126 pairs
    config = replace(
        toy_config, train=replace(toy_config.train, adapter_decay=decay, adapter_lr=0.01, weight_decay=0.0)
    )
    trainer = build_trainer(config, beir, encoder_folder)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    for weight in trainer.objective.model.parameters():
        weight.grad = torch.zeros_like(weight)
    trainer.optimizer.step()
    for name, weight in trainer.weights().items():
        share = 0.96 if name.startswith("adapter.") else 1.0
        torch.testing.assert_close(weight, share * before[name])


@pytest.mark.parametrize(("own", "decay"), [(20_000, 2.0), (10_000, 4.0), (1_000, 40.0), (9, 250.0)])
def test_a_prior_is_worth_so_many_pairs_however_many_there_are(own, decay):
    pairs = TrainingPairs(np.stack([np.arange(40_000)] * 2, axis=1), seed=0, batch=8, own=own)
    assert residual_group([], 2e-3, 4.0, pairs).decay == decay  # 9 pairs: half of the weights go in a step


# Whole runs -----------------------------------------------------------------------------------------------------------


def start(arguments, output):
    """Start a command; what it says goes to the file `output`."""
    with output.open("w") as file:
        return subprocess.Popen([*arguments], stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})


def final_weights(folder):
    return load_file(Path(folder) / "model" / "weights.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


@pytest.fixture
def settings_file(tmp_path, toy_config):
    path = tmp_path / "run.toml"
    path.write_text(to_toml(replace(toy_config, train=replace(toy_config.train, steps=90, checkpoint_every=8))))
    return path


def test_killed_runs_end_with_the_same_weights_bit_for_bit(tmp_path, beir, settings_file):
    arguments = [*ASI, "train", str(beir), "--config", str(settings_file)]
    said, resumed = tmp_path / "said", tmp_path / "killed"
    process = start([*arguments, "--out", str(tmp_path / "whole")], said)
    assert process.wait(120) == 0, said.read_text()
    draw = random.Random(1)
    kills = 0
    process = start([*arguments, "--out", str(resumed)], said)
    while process.poll() is None:
        # Wait until something more is saved, then kill within a stretch that holds several saves.
        known = set(resumed.glob("checkpoints/step-*"))
        while process.poll() is None and set(resumed.glob("checkpoints/step-*")) <= known:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.04))
        if kills < 4 and process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            process = start([*arguments, "--out", str(resumed), "--resume"], said)
    assert process.wait() == 0, said.read_text()
    assert kills >= 3
    assert same(final_weights(tmp_path / "whole"), final_weights(resumed))


def test_a_kill_during_a_save_changes_nothing(tmp_path, beir, settings_file):
    """The process kills itself in the middle of writing its third checkpoint, and once more before the last rename."""
    arguments = ["train", str(beir), "--config", str(settings_file)]
    said = tmp_path / "said"
    assert start([*ASI, *arguments, "--out", str(tmp_path / "whole")], said).wait(120) == 0, said.read_text()
    killing = """
import os, sys, asi.checkpoint as checkpoint
place, count = sys.argv.pop(1), 0
inner = getattr(checkpoint, place)
def dying(*arguments, **more):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), 9)
    return inner(*arguments, **more)
setattr(checkpoint, place, dying)
from asi.cli import main
main()
"""
    folder = ["--out", str(tmp_path / "killed"), "--resume"]
    for place in ("save_file", "checksum"):
        process = start([sys.executable, "-c", killing, place, *arguments, *folder], said)
        assert process.wait(120) == -signal.SIGKILL, said.read_text()
    assert start([*ASI, *arguments, *folder], said).wait(120) == 0, said.read_text()
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "killed"))


def test_sigterm_saves_and_leaves(tmp_path, beir, settings_file):
    folder, said = tmp_path / "run", tmp_path / "said"
    process = start([*ASI, "train", str(beir), "--config", str(settings_file), "--out", str(folder)], said)
    while not (folder / "log.jsonl").exists() or not (folder / "log.jsonl").read_text():
        time.sleep(0.01)
        assert process.poll() is None, said.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert "continue with --resume" in said.read_text()
    assert list(folder.glob("checkpoints/step-*/manifest.json"))


def test_two_processes_equal_one_with_the_same_batch(tmp_path, beir, settings_file):
    arguments = ["train", str(beir), "--config", str(settings_file), "--steps", "12", "--set", "train.start_heads=0"]
    said = tmp_path / "said"
    assert start([*ASI, *arguments, "--out", str(tmp_path / "one")], said).wait(120) == 0, said.read_text()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "asi"]
    assert start([*torchrun, *arguments, "--out", str(tmp_path / "two")], said).wait(180) == 0, said.read_text()
    assert said.read_text().count("trained and indexed") == 1
    expected, got = final_weights(tmp_path / "one"), final_weights(tmp_path / "two")
    for name, weight in expected.items():
        assert torch.allclose(weight, got[name], atol=2e-4), f"{name}: {(weight - got[name]).abs().max()}"


GROUP_ENDS = """
import os, torch
from asi.distributed import joined_processes
with joined_processes(torch.device("cpu")) as processes:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    processes.sum_gradients([weight])
    torch.optim.AdamW([weight]).step()
threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
assert not [name for name in threads if "gloo" in name], threads
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names under Linux")
def test_no_thread_outlives_the_group_of_processes(tmp_path):
    """One that did would now and then abort a process that has finished its work."""
    (tmp_path / "ends.py").write_text(GROUP_ENDS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    said = tmp_path / "said"
    assert start([*torchrun, str(tmp_path / "ends.py")], said).wait(120) == 0, said.read_text()


def test_collapse_is_seen_and_warned_of_and_the_default_does_not_collapse(tmp_path, beir, toy_config):
    """Without the terms that push documents apart, L_s pulls all of them into one docid."""
    warnings = []

    class Listening:
        def stage(self, name, total): ...
        def advance(self, done): ...
        def step(self, report): ...
        def message(self, text): ...
        def warning(self, text):
            warnings.append(text)

    bare = replace(toy_config.loss, contrastive=0.0, match=0.0, balance=0.0, reverse=0.0, straight_through_weight=1.0)
    config = replace(
        toy_config,
        loss=bare,
        train=replace(
            toy_config.train,
            start_heads=0.0,
            straight_through_start=0.0,
            straight_through_full=0.0,
            freeze_docids=1.0,
        ),
    )
    train(open_dataset(str(beir)), tmp_path / "bare", config, reporter=Listening())
    collapsed = last_health(tmp_path / "bare")
    assert collapsed["docids"] <= 6
    assert warnings
    assert "loss.contrastive" in warnings[-1]
    warnings.clear()
    train(open_dataset(str(beir)), tmp_path / "default", toy_config, reporter=Listening())
    assert last_health(tmp_path / "default")["docids"] >= 24
    assert not warnings


def last_health(folder):
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record["health"] for record in records if "health" in record][-1]


def test_a_run_in_minutes_fixes_its_steps_and_keeps_them(tmp_path, beir, toy_config):
    config = replace(toy_config, train=replace(toy_config.train, steps=None, minutes=0.05))
    calls = iter([False] * 5 + [True] * 100)
    with pytest.raises(Interrupted, match="continue with --resume"):
        train(open_dataset(str(beir)), tmp_path / "x", config, stopping=lambda: next(calls))
    steps = json.loads((tmp_path / "x" / "run.json").read_text())["steps"]
    assert steps >= 10
    train(open_dataset(str(beir)), tmp_path / "x", config, resume=True)
    assert json.loads((tmp_path / "x" / "run.json").read_text())["steps"] == steps
    last = json.loads((tmp_path / "x" / "log.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["steps"]) == (steps, steps)


class Counting(Silence):
    steps = 0

    def step(self, report):
        self.steps = report.step


@pytest.mark.parametrize("stopped_after", [6, 7, 8])
def test_heads_start_once_even_if_the_run_is_stopped(tmp_path, beir, toy_config, stopped_after):
    settings = replace(toy_config.train, steps=14, start_heads=0.5, docid_every=1, freeze_docids=1.0)
    config, dataset, counting = replace(toy_config, train=settings), open_dataset(str(beir)), Counting()
    train(dataset, tmp_path / "whole", config)
    with pytest.raises(Interrupted):
        train(dataset, tmp_path / "x", config, reporter=counting, stopping=lambda: counting.steps >= stopped_after)
    train(dataset, tmp_path / "x", config, resume=True)
    assert same(final_weights(tmp_path / "whole"), final_weights(tmp_path / "x"))
    start = [json.loads(line) for line in (tmp_path / "x" / "log.jsonl").read_text().splitlines()]
    assert start[-1]["losses"].keys() >= {"vector", "match"}


@pytest.mark.parametrize("with_queries", [False, True])
def test_heads_start_from_documents_with_pairs_and_if_wanted_their_queries(
    toy_config, beir, encoder_folder, monkeypatch, with_queries
):
    train = replace(toy_config.train, start_heads=0.2, start_with_queries=with_queries)
    objective = build_trainer(replace(toy_config, train=train), beir, encoder_folder).objective
    seen = []

    def fit_and_remember(vectors, *rest):
        seen.append(vectors)
        return fit_quantiser(vectors, *rest)

    monkeypatch.setattr("asi.objective.fit_quantiser", fit_and_remember)
    objective.enter(0.5)
    queries, documents = (np.unique(own) for own in objective.pairs.pairs[:, :2].T)
    assert len(documents) < len(objective.documents.tokens)  # the others are new
    texts = [(objective.documents, documents), *([(objective.queries, queries)] if with_queries else [])]
    with torch.no_grad():
        x = torch.cat([encode(objective.model, features, rows, states=False).x for features, rows in texts])
        assert torch.allclose(torch.cat(seen), objective.model.heads.inner(x))


def test_feature_dropout_is_even_and_depends_on_row_and_step_alone():
    vectors = torch.ones(2000, 64)
    rows = np.arange(2000)
    dropped = feature_dropout(vectors, rows, QUERY, 5, 0.2)
    assert float((dropped == 0).float().mean()) == pytest.approx(0.2, abs=0.01)
    assert (dropped == 0).float().mean(0).sub(0.2).abs().max() < 0.05
    assert (dropped == 0).float().mean(1).sub(0.2).abs().max() < 0.25
    assert float(dropped.max()) == pytest.approx(1.25)
    assert torch.equal(feature_dropout(vectors[7:9], rows[7:9], QUERY, 5, 0.2), dropped[7:9])
    for kind, step in ((QUERY, 6), (DOCUMENT, 5), (DOCUMENT, 4)):  # nothing tells which query and document are a pair
        other = feature_dropout(vectors, rows, kind, step, 0.2)
        both = ((other == 0) & (dropped == 0)).float().mean()
        assert float(both) == pytest.approx(0.04, abs=0.01)
