//! Distributions: a number, or a table with a kind and its parameters.

use std::path::PathBuf;
use std::sync::Arc;

use crate::doc::{Key, Table, optional, required, required_choice, required_path, section, value};

/// A distribution of positive numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Dist {
    /// A constant.
    Exact(f64),
    /// Uniform between both ends; whole numbers include both.
    Uniform {
        /// Minimum.
        min: f64,
        /// Maximum.
        max: f64,
    },
    /// Normal, clamped to the bounds.
    Normal {
        /// Mean before clamping.
        mean: f64,
        /// Standard deviation over mean, before clamping.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Log-normal with this mean and coefficient of variation (of the values, not their
    /// logarithms), clamped to the bounds.
    LogNormal {
        /// Mean before clamping.
        mean: f64,
        /// Standard deviation over mean, before clamping.
        cv: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Exponential, clamped to the bounds.
    Exponential {
        /// Mean before clamping.
        mean: f64,
        /// The bounds.
        bounds: Bounds,
    },
    /// Zipf's law over the whole numbers from `min` to `max`: the *k*-th of them (from 1) with a
    /// probability proportional to `k^-skew`.
    Zipf {
        /// Minimum, the most likely value.
        min: f64,
        /// Maximum.
        max: f64,
        /// Exponent; 0: all equal.
        skew: f64,
    },
    /// One of the values of a file, with equal probability.
    Empirical(Empirical),
    /// One of these values, by weight.
    Choice {
        /// Shape `[n]`, `n >= 1`.
        values: Vec<f64>,
        /// Shape `[n]`, at least one above 0.
        weights: Vec<f64>,
    },
}

/// Measured values: a column of a CSV file.
#[derive(Clone, Debug, PartialEq)]
pub struct Empirical {
    /// The file.
    pub path: PathBuf,
    /// Name of the column; `None`: the first one.
    pub column: Option<String>,
    /// Bounds that values are clamped to.
    pub bounds: Bounds,
    /// The values; empty until the user of the distribution has read the file.
    pub values: Arc<[f64]>,
}

/// Bounds of a distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Minimum. Default 0 (lengths are at least 1 in any case).
    pub min: f64,
    /// Maximum. Default: none.
    pub max: f64,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds {
            min: 0.0,
            max: f64::INFINITY,
        }
    }
}

impl Dist {
    /// The largest possible value; infinite if there is none.
    pub fn max(&self) -> f64 {
        match self {
            Dist::Exact(value) => *value,
            Dist::Uniform { max, .. } | Dist::Zipf { max, .. } => *max,
            Dist::Empirical(e) => e.bounds.max,
            Dist::Normal { bounds, .. }
            | Dist::LogNormal { bounds, .. }
            | Dist::Exponential { bounds, .. } => bounds.max,
            Dist::Choice { values, .. } => values.iter().copied().fold(f64::MIN, f64::max),
        }
    }

    /// The smallest possible value.
    pub fn min(&self) -> f64 {
        match self {
            Dist::Exact(value) => *value,
            Dist::Uniform { min, .. } | Dist::Zipf { min, .. } => *min,
            Dist::Empirical(e) => e.bounds.min,
            Dist::Normal { bounds, .. }
            | Dist::LogNormal { bounds, .. }
            | Dist::Exponential { bounds, .. } => bounds.min,
            Dist::Choice { values, .. } => values.iter().copied().fold(f64::MAX, f64::min),
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum DistKind {
    Exact,
    Uniform,
    Normal,
    LogNormal,
    Exponential,
    Zipf,
    Empirical,
    Choice,
}

const KINDS: &[(&str, DistKind)] = &[
    ("exact", DistKind::Exact),
    ("uniform", DistKind::Uniform),
    ("normal", DistKind::Normal),
    ("lognormal", DistKind::LogNormal),
    ("exponential", DistKind::Exponential),
    ("zipf", DistKind::Zipf),
    ("empirical", DistKind::Empirical),
    ("choice", DistKind::Choice),
];

section! {
    keys DistKeys of "DISTRIBUTION" {
        /// The distribution, above.
        key kind: DistKind = required_choice(
            KINDS,
            "set the distribution: `kind = \"lognormal\"`",
            DistKind::Exact,
        ).with_default_text("required");
        /// The value of `exact`.
        key value: f64 = required("set `value`", 0.0).with_description(AS_KEY).with_default_text("required");
        /// Mean before clamping.
        key mean: f64 = required("set `mean`", 1.0).with_description("above 0").with_default_text("required");
        /// Standard deviation over mean, before clamping.
        key cv: f64 = required("set `cv`: standard deviation over mean", 0.0)
            .within(0.0..=100.0).with_default_text("required");
        /// Minimum; values below it are raised to it.
        key min: f64 = required("set `min`", 0.0).with_description(AS_KEY).with_default_text("least of the key; `uniform`, `zipf`: required");
        /// Maximum; values above it are lowered to it.
        key max: f64 = required("set `max`", 0.0).with_description(AS_KEY).with_default_text("most of the key; `uniform`, `zipf`: required");
        /// Exponent of `zipf`; 0: all values are equally likely.
        key skew: f64 = value(1.0).within(0.0..=20.0);
        /// A CSV file; a relative path starts at the workload file.
        key file: PathBuf = required_path("set the CSV file: `file = \"lengths.csv\"`").with_default_text("required");
        /// Name of the file's column, in its first line.
        key column?: String = optional().with_description("text").with_default_text("the first column");
        /// The values of `choice`.
        key values: Vec<f64> = required("set the values: `values = [128, 1024]`", Vec::new())
            .with_description("list of numbers").with_default_text("required");
        /// Weights of the values.
        key weights?: Vec<f64> = optional().with_description("list of numbers of 0 or more").with_default_text("all 1");
    }
}

const AS_KEY: &str = "as the key with the distribution";

/// Parameters, and the kinds that have them.
const PARAMETERS: &[(&str, &[DistKind])] = {
    use DistKind as K;
    const BOUNDED: &[DistKind] = &[
        K::Uniform,
        K::Normal,
        K::LogNormal,
        K::Exponential,
        K::Zipf,
        K::Empirical,
    ];
    &[
        ("value", &[K::Exact]),
        ("mean", &[K::Normal, K::LogNormal, K::Exponential]),
        ("cv", &[K::Normal, K::LogNormal]),
        ("min", BOUNDED),
        ("max", BOUNDED),
        ("skew", &[K::Zipf]),
        ("file", &[K::Empirical]),
        ("column", &[K::Empirical]),
        ("values", &[K::Choice]),
        ("weights", &[K::Choice]),
    ]
};

/// Several distributions of one table, plain numbers first: a key after a sub-table would print
/// into the wrong table.
pub(super) fn read_dists<const N: usize>(t: &Table<'_>, keys: &[Key<f64>; N]) -> [Dist; N] {
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    order.sort_by_key(|i| t.has_table(keys[*i].name()));
    let mut dists: [Dist; N] = std::array::from_fn(|i| Dist::Exact(keys[i].default()));
    for i in order {
        dists[i] = read_dist(t, &keys[i]);
    }
    dists
}

/// A number, or a table with a distribution; all within the range of `key`.
fn read_dist(t: &Table<'_>, key: &Key<f64>) -> Dist {
    if !t.has_table(key.name()) {
        return Dist::Exact(key.read(t));
    }
    let range = key.range().expect("a distribution has a range");
    let (least, most, default) = (*range.start(), *range.end(), key.default());
    t.table(key.name(), |d| {
        let kind = DistKeys::kind().read(d);
        for (key, kinds) in PARAMETERS {
            if !kinds.contains(&kind) {
                d.unused(
                    key,
                    "kind",
                    "this kind of distribution has no such parameter",
                );
            }
        }
        let parameters = Parameters { d, least, most };
        parameters.read(kind, default)
    })
}

/// The table of a distribution, all of whose values are between `least` and `most`.
struct Parameters<'t> {
    d: &'t Table<'t>,
    least: f64,
    most: f64,
}

impl Parameters<'_> {
    fn read(&self, kind: DistKind, default: f64) -> Dist {
        match kind {
            DistKind::Exact => Dist::Exact(self.number(&DistKeys::value(), default)),
            DistKind::Uniform => {
                let (min, max) = (
                    self.number(&DistKeys::min(), default),
                    self.number(&DistKeys::max(), default),
                );
                self.check_order(min, max);
                Dist::Uniform { min, max }
            }
            DistKind::Normal => Dist::Normal {
                mean: self.mean(),
                cv: self.cv(),
                bounds: self.bounds(),
            },
            DistKind::LogNormal => Dist::LogNormal {
                mean: self.mean(),
                cv: self.cv(),
                bounds: self.bounds(),
            },
            DistKind::Exponential => Dist::Exponential {
                mean: self.mean(),
                bounds: self.bounds(),
            },
            DistKind::Zipf => {
                let (min, max) = (
                    self.whole(&DistKeys::min(), default),
                    self.whole(&DistKeys::max(), default),
                );
                self.check_order(min, max);
                let skew = DistKeys::skew().read(self.d);
                Dist::Zipf { min, max, skew }
            }
            DistKind::Empirical => Dist::Empirical(Empirical {
                path: DistKeys::file().read(self.d),
                column: DistKeys::column().read(self.d),
                bounds: self.bounds(),
                values: [].into(),
            }),
            DistKind::Choice => self.choice(default),
        }
    }

    fn number(&self, key: &Key<f64>, stand_in: f64) -> f64 {
        let number = key.field(self.d).within(self.least..=self.most);
        number.required(&format!("set `{}`", key.name()), stand_in)
    }

    fn whole(&self, key: &Key<f64>, stand_in: f64) -> f64 {
        let (least, most) = (self.least, self.most);
        let number = key.field(self.d).check(
            |v: &f64| (least..=most).contains(v) && v.fract() == 0.0,
            &format!("a whole number from {least} to {most}"),
        );
        number.required(&format!("set `{}`", key.name()), stand_in)
    }

    fn mean(&self) -> f64 {
        let fits = |m: &f64| *m > 0.0 && *m <= self.most;
        DistKeys::mean().read_if(self.d, fits, "above 0 and not huge")
    }

    fn cv(&self) -> f64 {
        DistKeys::cv().read(self.d)
    }

    fn bounds(&self) -> Bounds {
        let (least, most) = (self.least, self.most);
        let bounds = Bounds {
            min: DistKeys::min().field(self.d).within(least..=most).or(least),
            max: DistKeys::max().field(self.d).within(least..=most).or(most),
        };
        self.check_order(bounds.min, bounds.max);
        bounds
    }

    fn choice(&self, default: f64) -> Dist {
        let (least, most) = (self.least, self.most);
        let values = DistKeys::values();
        let field = values.field(self.d).check(
            |v| !v.is_empty() && v.iter().all(|v| (least..=most).contains(v)),
            &format!("numbers from {least} to {most}, at least one"),
        );
        let values = field.required("set the values: `values = [128, 1024]`", vec![default]);
        let fits = |w: &Vec<f64>| {
            w.len() == values.len() && w.iter().all(|w| *w >= 0.0) && w.iter().any(|w| *w > 0.0)
        };
        let must = format!("{} numbers, none negative, one above 0", values.len());
        let weights = DistKeys::weights().field(self.d).check(fits, &must);
        let weights = weights.or(vec![1.0; values.len()]);
        Dist::Choice { values, weights }
    }

    fn check_order(&self, min: f64, max: f64) {
        if min > max {
            self.d.error(
                "min",
                format!("`min` is {min}, above `max`, which is {max}"),
                "swap them",
            );
        }
    }
}
