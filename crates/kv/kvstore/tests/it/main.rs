//! Tiers and transports, tested through their public interface.

mod content;
mod processes;
mod tiers;
