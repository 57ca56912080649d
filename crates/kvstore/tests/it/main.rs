//! Tiers and transports as their callers see them.

mod processes;
mod tiers;
