//! Tiers and transports as their callers see them.

mod tiers;
