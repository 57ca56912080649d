//! Reports of a run: percentiles, tables, one stable JSON form, and the drag record.
//!
//! `bench`, `simulate` and `drag` report through the same types, so that any two runs can be
//! compared. This crate does not depend on the source of a number.
//!
//! - [`gaps`]: the gaps between stages of one run next to those of another.
//! - [`latency`]: histograms of durations with a stated precision, and their percentiles.
//! - [`measure`]: counts and histograms of a run in progress, added up over threads;
//!   [`objectives`]: service-level objectives of requests.
//! - [`run`]: the result of one run, as printed and as JSON.
//! - [`table`]: plain text tables; [`compare`]: two or more runs next to each other with ratios.
//! - [`record`]: files of records, CSV or Parquet.
//! - [`html`]: self-contained pages with plots.
//! - [`pass`]: passes of engines; [`series`]: a run over time, in bins.
//! - [`perfetto`]: a run as a trace for viewers.
//! - [`drag`]: one row per request with the time of each stage; writer and reader.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod compare;
pub mod drag;
pub mod gaps;
pub mod html;
pub mod latency;
pub mod lengths;
pub mod measure;
pub mod objectives;
pub mod overload;
pub mod partial;
pub mod pass;
pub mod perfetto;
pub mod record;
pub mod run;
pub mod series;
pub mod table;

pub use drag::{DragReader, DragRecord, DragWriter};
pub use latency::{Latency, Percentiles};
pub use measure::{Answered, Distributions, Failed, Timeline, Totals};
pub use objectives::Objectives;
pub use pass::PassRecord;
pub use run::RunReport;
pub use series::Series;
pub use slipstream_base::Slo;
