//! x
pub mod fpm;
pub mod kv;
mod msgpack;
