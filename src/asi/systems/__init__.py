"""The systems that ours is compared with, and ours among them: each file is one mechanism, `table` says which systems
are made of it. All are trained by the project's one loop and answer as `asi.records.Retriever`."""
