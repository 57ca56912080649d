//! Properties of streams across modules.

mod chunks;
mod errors;
mod resume;
