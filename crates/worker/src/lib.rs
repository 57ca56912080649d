//! Engines in wall-clock time: pass timer, output fan-out, metrics and KV event publishers.
