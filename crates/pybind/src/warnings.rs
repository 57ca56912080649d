//! What Rust has to say to a person, kept until Python asks for it and logs it.
//!
//! Threads of the store may hold locks that Python's thread waits for, so they must not wait for
//! the interpreter, as logging does.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Warnings kept; older ones give way, and are counted.
const KEPT_MAX: usize = 256;

struct Kept {
    texts: VecDeque<String>,
    dropped: usize,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept {
    texts: VecDeque::new(),
    dropped: 0,
});

struct Collector;

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.texts.len() == KEPT_MAX {
            kept.texts.pop_front();
            kept.dropped += 1;
        }
        kept.texts.push_back(text.0);
    }

    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

/// Begins to collect.
pub(crate) fn collect() {
    // Another extension of the same library may have been loaded before; one collector does.
    let _ = tracing::subscriber::set_global_default(Collector);
}

/// Returns and forgets the warnings since the last call.
#[pyfunction]
pub(crate) fn take_warnings() -> Vec<String> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut texts: Vec<String> = kept.texts.drain(..).collect();
    if kept.dropped > 0 {
        texts.push(format!("{} warnings more were dropped", kept.dropped));
        kept.dropped = 0;
    }
    texts
}
