//! Many clusters, and which of them are worth having.

use std::str::FromStr;

/// Values of one key of the cluster file: `engine.max_num_seqs=64,128,256` or
/// `pool.main.workers=2..8` (both ends included; `2..16..2` in steps of 2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vary {
    /// The key.
    pub key: String,
    /// Its values, as they would be written behind `--set KEY=`.
    pub values: Vec<String>,
}

/// Values that one key may take.
const VALUES_MAX: usize = 10_000;

impl FromStr for Vary {
    type Err = String;

    fn from_str(text: &str) -> Result<Vary, String> {
        let form = "write KEY=A,B,C or KEY=FIRST..LAST[..STEP]";
        let (key, values) = text
            .split_once('=')
            .ok_or_else(|| format!("`{text}` has no `=`; {form}"))?;
        let mut all = Vec::new();
        for part in values.split(',') {
            let ends: Vec<&str> = part.split("..").collect();
            let [first, last, ref step @ ..] = ends[..] else {
                all.push(part.trim().to_owned());
                continue;
            };
            let whole = |text: &str| {
                text.trim()
                    .parse::<u64>()
                    .map_err(|_| format!("`{part}` is no range of whole numbers; {form}"))
            };
            let (first, last) = (whole(first)?, whole(last)?);
            let step = match step {
                [] => 1,
                [step] => whole(step)?,
                _ => return Err(format!("`{part}` is no range; {form}")),
            };
            if step == 0 || first > last {
                return Err(format!("`{part}` holds nothing; {form}"));
            }
            let count = (last - first) / step + 1;
            if count > VALUES_MAX as u64 {
                return Err(format!(
                    "`{part}` is {count} values; at most {VALUES_MAX} are taken"
                ));
            }
            all.extend((0..count).map(|n| (first + n * step).to_string()));
        }
        if key.trim().is_empty() || all.iter().any(String::is_empty) {
            return Err(format!("`{text}` lacks a key or a value; {form}"));
        }
        Ok(Vary {
            key: key.trim().to_owned(),
            values: all,
        })
    }
}

/// Every combination of the values, the last key's changing fastest. Shape of each: `[varies]`.
pub fn combinations(varies: &[Vary]) -> Vec<Vec<&str>> {
    let mut all = vec![Vec::new()];
    for vary in varies {
        all = all
            .into_iter()
            .flat_map(|before: Vec<&str>| {
                vary.values.iter().map(move |value| {
                    let mut next = before.clone();
                    next.push(value);
                    next
                })
            })
            .collect();
    }
    all
}

/// What a configuration gives and takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// More is better.
    pub gain: f64,
    /// Less is better.
    pub cost: f64,
}

/// Which points no other one beats: another is at least as good in both, and better in one. Points
/// that are equal stand or fall together. Shape: `[points]`.
pub fn pareto(points: &[Point]) -> Vec<bool> {
    points
        .iter()
        .map(|point| {
            !points.iter().any(|other| {
                other.gain >= point.gain
                    && other.cost <= point.cost
                    && (other.gain > point.gain || other.cost < point.cost)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_are_lists_and_ranges() {
        let values = |text: &str| text.parse::<Vary>().unwrap().values;
        assert_eq!(values("a.b=64,128"), ["64", "128"]);
        assert_eq!(values("a.b=kv,round_robin"), ["kv", "round_robin"]);
        assert_eq!(values("a=2..5"), ["2", "3", "4", "5"]);
        assert_eq!(values("a=1,4..16..4"), ["1", "4", "8", "12", "16"]);
        assert_eq!(values("a=0.5,1.5"), ["0.5", "1.5"]);
        for bad in [
            "a",
            "a=",
            "=1",
            "a=1,,2",
            "a=5..2",
            "a=1..9..0",
            "a=x..y",
            "a=1..2..3..4",
            "a=0..99999",
        ] {
            let error = bad.parse::<Vary>().unwrap_err();
            assert!(error.contains('`'), "{bad}: {error}");
        }
    }

    #[test]
    fn combinations_are_all_and_in_order() {
        let varies = ["a=1,2", "b=x,y,z"].map(|text| text.parse::<Vary>().unwrap());
        let all = combinations(&varies);
        assert_eq!(all.len(), 6);
        assert_eq!(
            (&all[0], &all[1], &all[5]),
            (&vec!["1", "x"], &vec!["1", "y"], &vec!["2", "z"])
        );
        assert_eq!(combinations(&[]), [Vec::<&str>::new()]);
    }

    #[test]
    fn the_front_is_what_nobody_beats() {
        let points = [
            (5.0, 2.0),
            (5.0, 3.0),
            (9.0, 4.0),
            (4.0, 2.0),
            (9.0, 4.0),
            (1.0, 1.0),
        ]
        .map(|(gain, cost)| Point { gain, cost });
        assert_eq!(pareto(&points), [true, false, true, false, true, true]);
    }

    proptest! {
        #[test]
        fn whoever_is_off_the_front_is_beaten_by_one_on_it(
            points in prop::collection::vec((0u8..6, 0u8..6), 1..20),
        ) {
            let points: Vec<Point> = points
                .iter()
                .map(|&(gain, cost)| Point { gain: gain.into(), cost: cost.into() })
                .collect();
            let front = pareto(&points);
            prop_assert!(front.contains(&true));
            for (point, on) in points.iter().zip(&front) {
                let beaten = points.iter().zip(&front).any(|(other, on)| {
                    *on && other.gain >= point.gain && other.cost <= point.cost && other != point
                });
                prop_assert_eq!(!*on, beaten);
            }
        }
    }
}
