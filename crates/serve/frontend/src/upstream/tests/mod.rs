//! Properties of streams across modules.

mod chunks;
mod resume;
