"""One module per patch, nothing else; each exports `PATCH` and reads the same: why, target, build."""
