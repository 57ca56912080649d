//! Distributions: a number, or a table with a kind and its parameters.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use super::{Bounds, Dist, Empirical};
use crate::doc::Table;

#[derive(Clone, Copy, PartialEq)]
enum DistKind {
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
pub(super) fn read_dists<const N: usize>(
    t: &Table<'_>,
    keys: &[(&str, f64, RangeInclusive<f64>); N],
) -> [Dist; N] {
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    order.sort_by_key(|i| t.has_table(keys[*i].0));
    let mut dists: [Dist; N] = std::array::from_fn(|i| Dist::Exact(keys[i].1));
    for i in order {
        let (key, default, range) = &keys[i];
        dists[i] = read_dist(t, key, *default, *range.start(), *range.end());
    }
    dists
}

/// A number, or a table with a distribution; all between `least` and `most`.
fn read_dist(t: &Table<'_>, key: &str, default: f64, least: f64, most: f64) -> Dist {
    if !t.has_table(key) {
        return Dist::Exact(t.get(key).within(least..=most).or(default));
    }
    t.table(key, |d| {
        let kind = d.choice("kind", KINDS).required(
            "set the distribution: `kind = \"lognormal\"`",
            DistKind::Exact,
        );
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
            DistKind::Exact => Dist::Exact(self.number("value", default)),
            DistKind::Uniform => {
                let (min, max) = (self.number("min", default), self.number("max", default));
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
                let (min, max) = (self.whole("min", default), self.whole("max", default));
                self.check_order(min, max);
                let skew = self.d.get("skew").within(0.0..=20.0).or(1.0);
                Dist::Zipf { min, max, skew }
            }
            DistKind::Empirical => Dist::Empirical(Empirical {
                path: self
                    .d
                    .path("file")
                    .required("set the CSV file: `file = \"lengths.csv\"`", PathBuf::new()),
                column: self.d.get("column").optional(),
                bounds: self.bounds(),
                values: [].into(),
            }),
            DistKind::Choice => self.choice(default),
        }
    }

    fn number(&self, key: &str, stand_in: f64) -> f64 {
        let number = self.d.get(key).within(self.least..=self.most);
        number.required(&format!("set `{key}`"), stand_in)
    }

    fn whole(&self, key: &str, stand_in: f64) -> f64 {
        let (least, most) = (self.least, self.most);
        self.d
            .get(key)
            .check(
                |v: &f64| (least..=most).contains(v) && v.fract() == 0.0,
                &format!("a whole number from {least} to {most}"),
            )
            .required(&format!("set `{key}`"), stand_in)
    }

    fn mean(&self) -> f64 {
        self.d
            .get("mean")
            .check(|m| *m > 0.0 && *m <= self.most, "above 0 and not huge")
            .required("set `mean`", 1.0)
    }

    fn cv(&self) -> f64 {
        self.d
            .get("cv")
            .within(0.0..=100.0)
            .required("set `cv`: standard deviation over mean", 0.0)
    }

    fn bounds(&self) -> Bounds {
        let (least, most) = (self.least, self.most);
        let bounds = Bounds {
            min: self.d.get("min").within(least..=most).or(least),
            max: self.d.get("max").within(least..=most).or(most),
        };
        self.check_order(bounds.min, bounds.max);
        bounds
    }

    fn choice(&self, default: f64) -> Dist {
        let (least, most) = (self.least, self.most);
        let values = self
            .d
            .get::<Vec<f64>>("values")
            .check(
                |v| !v.is_empty() && v.iter().all(|v| (least..=most).contains(v)),
                &format!("numbers from {least} to {most}, at least one"),
            )
            .required("set the values: `values = [128, 1024]`", vec![default]);
        let weights = self
            .d
            .get::<Vec<f64>>("weights")
            .check(
                |w| {
                    w.len() == values.len()
                        && w.iter().all(|w| *w >= 0.0)
                        && w.iter().any(|w| *w > 0.0)
                },
                &format!("{} numbers, none negative, one above 0", values.len()),
            )
            .or(vec![1.0; values.len()]);
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
