"""The systems that ours is compared with: each file is one mechanism, and each satisfies `asi.records.Retriever`."""
