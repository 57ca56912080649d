//! The `slipstream` binary.
fn main() {}
