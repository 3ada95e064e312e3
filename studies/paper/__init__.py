"""InferCept's latency by load, its waste and its ablation, simulated, beside what the paper reports."""
