//! Tiers and transports as their callers see them.

mod content;
mod processes;
mod tiers;
