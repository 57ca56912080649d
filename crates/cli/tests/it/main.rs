//! The real binary, as a user runs it.

mod arrows;
mod attacks;
mod describe;
mod disaggregated;
mod doctor;
mod document_commands;
mod documents;
mod drivers;
mod duplex;
mod engines;
mod first_commands;
mod kv;
mod membership;
mod misbehaving_peers;
mod net;
mod plan;
mod planes;
mod predict;
mod record;
mod results;
mod serve;
mod server;
mod survive;
mod torture;
mod twin;
mod ui;
