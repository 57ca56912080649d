//! Service-level objectives of a request: `ttft=1s,itl=50ms`. Each class of a workload may have its
//! own.

use std::fmt;
use std::str::FromStr;

use crate::width::round_u64;

/// Objectives, ns; `None` if not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    text: String,
    ttft: Option<u64>,
    itl: Option<u64>,
    itl_max: Option<u64>,
    tpot: Option<u64>,
    e2e: Option<u64>,
}

/// Measured latencies of a request, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// From due time to first token.
    pub ttft: u64,
    /// Mean gap between events with text.
    pub itl: u64,
    /// Longest gap between events with text.
    pub itl_max: u64,
    /// (E2E − TTFT) / (OSL − 1).
    pub tpot: u64,
    /// From due time to last token.
    pub e2e: u64,
}

impl Slo {
    /// Whether an objective concerns the longest gap between two tokens of a request.
    pub fn reads_longest_gap(&self) -> bool {
        self.itl_max.is_some()
    }

    /// The objective called `name` (as in `ttft=1s`), ns, if it is set.
    pub fn limit_ns(&self, name: &str) -> Option<u64> {
        match name {
            "ttft" => self.ttft,
            "itl" => self.itl,
            "itl_max" => self.itl_max,
            "tpot" => self.tpot,
            "e2e" => self.e2e,
            _ => None,
        }
    }

    /// The same objectives with every limit multiplied by `factor`, above 0.
    pub fn scaled(&self, factor: f64) -> Slo {
        let scale = |limit: Option<u64>| limit.map(|ns| round_u64(ns as f64 * factor));
        let limits = [
            ("ttft", scale(self.ttft)),
            ("itl", scale(self.itl)),
            ("itl_max", scale(self.itl_max)),
            ("tpot", scale(self.tpot)),
            ("e2e", scale(self.e2e)),
        ];
        let text: Vec<String> = limits
            .iter()
            .filter_map(|(name, limit)| Some(format!("{name}={}us", (*limit)? as f64 / 1e3)))
            .collect();
        let [ttft, itl, itl_max, tpot, e2e] = limits.map(|(_, limit)| limit);
        Slo {
            text: text.join(","),
            ttft,
            itl,
            itl_max,
            tpot,
            e2e,
        }
    }

    /// The name of each objective, with whether an answered request met it.
    pub fn each_met(&self, shown: &Shown) -> impl Iterator<Item = (&'static str, bool)> {
        [
            ("ttft", self.ttft, shown.ttft),
            ("itl", self.itl, shown.itl),
            ("itl_max", self.itl_max, shown.itl_max),
            ("tpot", self.tpot, shown.tpot),
            ("e2e", self.e2e, shown.e2e),
        ]
        .into_iter()
        .filter_map(|(name, limit, value)| Some((name, value <= limit?)))
    }

    /// Whether an answered request met every objective.
    pub fn is_met(&self, shown: &Shown) -> bool {
        [
            (self.ttft, shown.ttft),
            (self.itl, shown.itl),
            (self.itl_max, shown.itl_max),
            (self.tpot, shown.tpot),
            (self.e2e, shown.e2e),
        ]
        .iter()
        .all(|(limit, value)| limit.is_none_or(|limit| *value <= limit))
    }
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Slo, String> {
        let mut slo = Slo {
            text: text.to_owned(),
            ..Slo::default()
        };
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                format!("`{part}` is not NAME=TIME; for example ttft=1s,itl=50ms")
            })?;
            let slot = match name.trim() {
                "ttft" => &mut slo.ttft,
                "itl" => &mut slo.itl,
                "itl_max" => &mut slo.itl_max,
                "tpot" => &mut slo.tpot,
                "e2e" => &mut slo.e2e,
                other => {
                    return Err(format!(
                        "`{other}` is not an objective; expected ttft, itl (mean gap), itl_max (longest gap), tpot, e2e"
                    ));
                }
            };
            if slot.replace(parse_ns(value.trim())?).is_some() {
                return Err(format!(
                    "`{}` is stated twice in `{text}`; keep one",
                    name.trim()
                ));
            }
        }
        Ok(slo)
    }
}

impl fmt::Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Reads a time with its unit, `50ms` or `1.5s`, as ns.
///
/// # Errors
/// A message with the expected form.
pub fn parse_ns(text: &str) -> Result<u64, String> {
    let unit_at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let scale = match unit {
        "ns" => 1.0,
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "m" | "min" => 60e9,
        "h" => 3_600e9,
        _ => {
            return Err(format!(
                "`{text}` is not a time; write a number and a unit: us, ms, s, m or h"
            ));
        }
    };
    let number: f64 = number
        .trim()
        .parse()
        .map_err(|_| format!("`{text}` is not a time; for example 50ms"))?;
    if !(number.is_finite() && number >= 0.0) {
        return Err(format!("`{text}` is not a time: it must not be negative"));
    }
    Ok(round_u64(number * scale))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stated_objective_counts() {
        let slo: Slo = "ttft=1s, itl=50ms".parse().unwrap();
        let good = Shown {
            ttft: 1_000_000_000,
            itl: 50_000_000,
            itl_max: u64::MAX,
            tpot: u64::MAX,
            e2e: u64::MAX,
        };
        assert!(slo.is_met(&good));
        assert!(!slo.is_met(&Shown {
            ttft: 1_000_000_001,
            ..good
        }));
        assert!(!slo.is_met(&Shown {
            itl: 50_000_001,
            ..good
        }));
        assert_eq!(slo.to_string(), "ttft=1s, itl=50ms");
    }

    #[test]
    fn limits_scale_together() {
        let slo: Slo = "ttft=1s,tpot=50ms".parse().unwrap();
        let tight = slo.scaled(0.8);
        assert_eq!(tight.limit_ns("ttft"), Some(800_000_000));
        assert_eq!(tight.limit_ns("tpot"), Some(40_000_000));
        assert_eq!(tight.limit_ns("itl"), None);
        assert_eq!(tight.to_string().parse::<Slo>().unwrap(), tight);
        let shown = Shown {
            ttft: 900_000_000,
            ..Shown::default()
        };
        let each: Vec<_> = tight.each_met(&shown).collect();
        assert_eq!(each, [("ttft", false), ("tpot", true)]);
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        for (text, says) in [
            ("ttft", "NAME=TIME"),
            ("tftt=1s", "expected ttft"),
            ("ttft=1", "unit"),
            ("ttft=-1s", "negative"),
            ("ttft=xs", "not a time"),
            (
                "ttft=1ms,ttft=1s",
                "`ttft` is stated twice in `ttft=1ms,ttft=1s`",
            ),
            ("itl=1ms, e2e=1s,itl =1ms", "`itl` is stated twice"),
        ] {
            let error = text.parse::<Slo>().unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        assert_eq!(parse_ns("1.5s"), Ok(1_500_000_000));
        assert_eq!(parse_ns("250us"), Ok(250_000));
    }
}
