//! `[engine.output_len]`: the distribution of answer lengths, if no limit ends an answer earlier.

use crate::doc::{Table, choice, required, section, value};

/// Distribution of natural answer lengths, tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputLen {
    /// A constant length.
    Constant(u32),
    /// Log-normal with the given mean and coefficient of variation; at least 1.
    LogNormal {
        /// Mean, tokens.
        mean: f64,
        /// Standard deviation over mean.
        cv: f64,
    },
}

impl Default for OutputLen {
    fn default() -> Self {
        OutputLen::LogNormal {
            mean: OutputLenKeys::mean().default(),
            cv: OutputLenKeys::cv().default(),
        }
    }
}

#[derive(Clone, PartialEq)]
pub(crate) enum Kind {
    Constant,
    LogNormal,
}

const KINDS: &[(&str, Kind)] = &[("constant", Kind::Constant), ("lognormal", Kind::LogNormal)];
const TOKENS_MAX: f64 = 16_777_216.0;

section! {
    keys OutputLenKeys of "engine.output_len" {
        /// Distribution of natural answer lengths, drawn from a request's seed. Not used if a request sets
        /// `ignore_eos`.
        ///
        /// "constant" makes equal requests end together, unlike real ones.
        key kind: Kind = choice(KINDS, Kind::LogNormal);
        /// The length.
        ///
        /// Above the requests' `max_tokens`, it has no effect.
        key tokens: u32 = required("set the number", 1).within(1..=1 << 24)
            .unit("tokens").note("needed for \"constant\"");
        /// Mean of the lognormal.
        ///
        /// Above the requests' `max_tokens`, it has little effect.
        key mean: f64 = value(256.0).within(1.0..=TOKENS_MAX).unit("tokens");
        /// Standard deviation over mean of the lognormal.
        ///
        /// High: a few answers run to `max_tokens`, most are very short.
        key cv: f64 = value(0.7).within(0.0..=10.0);
    }
}

pub(super) fn read_output_len(t: &Table<'_>) -> OutputLen {
    match OutputLenKeys::kind().read(t) {
        Kind::Constant => {
            for key in ["mean", "cv"] {
                t.unused(key, "kind", "`kind` is \"constant\"");
            }
            OutputLen::Constant(OutputLenKeys::tokens().read(t))
        }
        Kind::LogNormal => {
            t.unused("tokens", "kind", "`kind` is \"lognormal\"");
            OutputLen::LogNormal {
                mean: OutputLenKeys::mean().read(t),
                cv: OutputLenKeys::cv().read(t),
            }
        }
    }
}
