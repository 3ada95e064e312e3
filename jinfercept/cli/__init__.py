"""Every command of `jinfercept`: its flags and what it prints. Knows every room; no room knows it."""
