//! The real binary, as a user runs it.

mod serve;
mod server;
