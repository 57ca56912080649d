//! Tests of the router's control plane in this process, in front of scripted engines.

mod embedded;
mod reload;
