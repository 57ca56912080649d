//! What a run is told as: percentiles, tables, one stable JSON form, and the drag record.
//!
//! `bench`, `simulate` and `drag` report through the same types, so that two runs can be put side
//! by side whatever produced them. Nothing here knows where a number came from.
//!
//! - [`hand_over`]: the gaps between stages of one run beside those of another.
//! - [`latency`]: histograms of durations with a stated precision, and their percentiles.
//! - [`measure`]: what a run has shown so far, to be added up over threads; [`objectives`]: what requests are to meet.
//! - [`run`]: the result of one run, as printed and as JSON.
//! - [`table`]: plain text tables; [`compare`]: two or more runs side by side with ratios.
//! - [`record`]: files of records, CSV or Parquet.
//! - [`html`]: self-contained pages with plots.
//! - [`pass`]: passes of engines; [`series`]: a run over time, in bins.
//! - [`perfetto`]: a run as a trace for viewers.
//! - [`drag`]: one row a request with the time of each hand-over; writer and reader.
#![forbid(unsafe_code)]

pub mod compare;
pub mod drag;
pub mod hand_over;
pub mod html;
pub mod latency;
pub mod measure;
pub mod objectives;
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
