//! Metrics of servers: families as tables, and the pages that scrapers read.
//!
//! A part of a server declares a table of [`Family`] rows (name, help, kind, how its samples are read), and
//! [`collector`] makes a collector of it. [`Format`] writes a registry's page in the format that a scraper prefers.
#![forbid(unsafe_code)]

mod family;
mod page;

pub use family::{Family, Samples, collector};
pub use page::Format;
pub use prometheus_client::collector::Collector;
pub use prometheus_client::registry::Registry;
