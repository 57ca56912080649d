//! Reads a TOML document, reports *all* errors together, each with its line and remedy, and records
//! the origin of every value.
//!
//! serde stops at the first error and drops positions. Here a [`Doc`] holds the parsed document
//! with positions, overlaid by environment and flags. [`Doc::read`] walks it with [`Table`]s and
//! [`Field`]s, which record errors and continue with a default. The result is either the value with
//! its [`Settings`] (effective values with origins), or [`Diagnostics`].
//!
//! ```
//! use slipstream_config::doc::Doc;
//!
//! #[derive(Debug, PartialEq)]
//! struct Job { rate: f64, kind: Kind, seed: Option<u64> }
//! #[derive(Clone, Debug, PartialEq)]
//! enum Kind { Poisson, Constant }
//!
//! fn read(doc: Doc) -> Result<Job, slipstream_config::doc::Diagnostics> {
//!     let (job, _settings) = doc.read(|root| {
//!         root.table("arrivals", |t| Job {
//!             rate: t.get("rate").within(0.001..=1e9).or(1.0),
//!             kind: t.choice("kind", &[("poisson", Kind::Poisson), ("constant", Kind::Constant)])
//!                 .or(Kind::Poisson),
//!             seed: t.get("seed").optional(),
//!         })
//!     })?;
//!     Ok(job)
//! }
//!
//! let mut doc = Doc::parse("job.toml", b"[arrivals]\nkind = \"constant\"\n");
//! doc.set("arrivals.rate=50");
//! assert_eq!(read(doc).unwrap(), Job { rate: 50.0, kind: Kind::Constant, seed: None });
//!
//! let doc = Doc::parse("job.toml", b"[arrivals]\nrate = \"fast\"\nknid = \"poisson\"\n");
//! assert_eq!(
//!     format!("error: {}", read(doc).unwrap_err()),
//!     "error: job.toml:2:8: `arrivals.rate` is a string (\"fast\"), but must be a finite number\n\
//!      error: job.toml:3:1: unknown key `arrivals.knid`\n\
//!      hint: did you mean `kind`?",
//! );
//! ```
//!
//! | module | content |
//! | --- | --- |
//! | `node` | the document as a tree with origins; layers over it |
//! | `table` | typed reading |
//! | `key` | keys that are declared once, and read, documented and given a default from there |
//! | `diagnostic` | errors, for users |
//! | `settings` | effective values and their origins, as TOML |

mod diagnostic;
mod key;
mod node;
mod settings;
mod table;

pub use diagnostic::{Diagnostic, Diagnostics, suggestion};
pub use key::Row;
#[cfg(test)]
pub(crate) use key::markdown_table;
pub(crate) use key::{
    Key, NoDefault, Section, choice, optional, optional_choice, path, required, required_choice,
    required_path, section, subtable, text, value,
};
pub use node::{Doc, Origin};
pub use settings::{Setting, Settings};
pub use table::{Field, Scalar, Table, Value};
