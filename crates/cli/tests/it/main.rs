//! The real binary, as a user runs it.

mod arrows;
mod doctor;
mod documents;
mod drivers;
mod hand_over;
mod kv;
mod net;
mod planes;
mod results;
mod serve;
mod server;
mod strangers;
mod talk;
mod torture;
mod twin;
