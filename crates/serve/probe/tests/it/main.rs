//! Tests of the crate against engines that are played by the test.

mod facts;
mod follow;
mod mirror;
mod mutations;
