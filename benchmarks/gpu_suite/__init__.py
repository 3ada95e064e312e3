"""The GPU suite: what kernels, steps, transfers and policies reach on a real device, measured part by part. See `suite`."""
