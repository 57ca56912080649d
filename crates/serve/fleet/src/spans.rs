//! The spans of a server's requests.

use std::sync::OnceLock;
use std::time::Duration;

use anyhow::Context;
use slipstream_config::cluster::EngineUrl;
use slipstream_frontend::{SpanExporter, SpanFlusher};

/// Of this process's exporter.
static FLUSHER: OnceLock<SpanFlusher> = OnceLock::new();

/// Sends the spans of requests that have ended, in a fraction of a second, before the process exits.
pub fn flush() {
    if let Some(flusher) = FLUSHER.get() {
        flusher.flush(Duration::from_millis(500));
    }
}

/// Starts the thread that sends spans to the collector at `url`. `OTEL_SERVICE_NAME` names the service.
///
/// # Errors
/// The thread cannot be started.
pub fn start(url: EngineUrl) -> anyhow::Result<SpanExporter> {
    let name = std::env::var("OTEL_SERVICE_NAME").unwrap_or_default();
    let name = if name.is_empty() { "slipstream" } else { &name };
    let exporter =
        SpanExporter::start(url, name).context("starting the thread that sends spans")?;
    let _ = FLUSHER.set(exporter.flusher()); // a process has one
    Ok(exporter)
}
