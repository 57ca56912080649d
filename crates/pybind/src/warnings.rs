//! Warnings of Rust code, kept until Python takes them and logs them.
//!
//! Threads of the store may hold locks that Python's thread waits for. They must therefore not wait for
//! the interpreter, which logging does.
//!
//! Of the warnings from one place in the code, the first few of each minute are kept. The rest
//! is counted, and the count is reported as a warning at the end of the minute.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::lock;

/// Maximum warnings kept; older ones are dropped, and counted.
const KEPT_MAX: usize = 256;
/// Maximum warnings kept per place and window.
const SAME_MAX: u64 = 3;
const WINDOW: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Kept {
    texts: VecDeque<String>,
    dropped: usize,
    /// By place in the code, of which there are few.
    places: Option<HashMap<Identifier, Place>>,
}

/// Warnings of one place in the code in its window.
struct Place {
    began: Instant,
    count: u64,
    last: String,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept {
    texts: VecDeque::new(),
    dropped: 0,
    places: None,
});

impl Kept {
    fn keep(&mut self, text: String) {
        if self.texts.len() == KEPT_MAX {
            self.texts.pop_front();
            self.dropped += 1;
        }
        self.texts.push_back(text);
    }

    fn note(&mut self, place: Identifier, text: String, now: Instant) {
        self.end_windows(now);
        let places = self.places.get_or_insert_default();
        let noted = places.entry(place).or_insert_with(|| Place {
            began: now,
            count: 0,
            last: String::new(),
        });
        noted.count += 1;
        if noted.count > SAME_MAX {
            noted.last = text;
            return;
        }
        self.keep(text);
    }

    /// Ends expired windows, and reports the number of omitted warnings in each.
    fn end_windows(&mut self, now: Instant) {
        let Some(places) = &mut self.places else {
            return;
        };
        let mut texts = Vec::new();
        places.retain(|_, place| {
            let is_over = now.duration_since(place.began) >= WINDOW;
            if is_over && place.count > SAME_MAX {
                texts.push(format!(
                    "{} more warnings like this in {} s, the last one: {}",
                    place.count - SAME_MAX,
                    WINDOW.as_secs(),
                    place.last
                ));
            }
            !is_over
        });
        for text in texts {
            self.keep(text);
        }
    }
}

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
        let place = event.metadata().callsite();
        lock(&KEPT).note(place, text.0, Instant::now());
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

/// Starts to collect warnings.
pub(crate) fn collect() {
    // Another extension of the same library may have been loaded before; one collector suffices.
    let _ = tracing::subscriber::set_global_default(Collector);
}

/// Returns and removes the warnings since the last call. `ahead_s` advances the clock, for
/// tests and for the last call of a process.
#[pyfunction]
#[pyo3(signature = (ahead_s=0.0))]
pub(crate) fn take_warnings(ahead_s: f64) -> Vec<String> {
    let mut kept = lock(&KEPT);
    let ahead = Duration::from_secs_f64(ahead_s.clamp(0.0, 1e6));
    kept.end_windows(Instant::now() + ahead);
    let mut texts: Vec<String> = kept.texts.drain(..).collect();
    if kept.dropped > 0 {
        texts.push(format!("{} more warnings were dropped", kept.dropped));
        kept.dropped = 0;
    }
    texts
}
