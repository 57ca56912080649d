//! Many configurations, and the Pareto-optimal ones.

use std::collections::HashSet;
use std::str::FromStr;

/// Values of one key of the cluster file: `engine.max_num_seqs=64,128,256` or
/// `pool.main.workers=2..8` (both ends included; `2..16..2` in steps of 2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vary {
    /// The key.
    pub key: String,
    /// Its values, each once, as written in `--set KEY=`.
    pub values: Vec<String>,
}

/// Limit of values per key.
const VALUES_MAX: usize = 10_000;

impl FromStr for Vary {
    type Err = String;

    fn from_str(text: &str) -> Result<Vary, String> {
        let form = "write KEY=A,B,C or KEY=FIRST..LAST[..STEP]";
        let (key, values) = text
            .split_once('=')
            .ok_or_else(|| format!("`{text}` has no `=`; {form}"))?;
        let mut all = Vec::new();
        // Values that are listed; ranges may overlap.
        let mut listed = HashSet::new();
        for part in values.split(',') {
            let ends: Vec<&str> = part.split("..").collect();
            let [first, last, ref step @ ..] = ends[..] else {
                let value = part.trim();
                if !listed.insert(value) {
                    return Err(format!("`{key}` has {value} twice; keep one"));
                }
                all.push(value.to_owned());
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
        let mut seen = HashSet::new();
        all.retain(|value| seen.insert(value.clone()));
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

/// Goodput and cost of a configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Goodput: more is better.
    pub gain: f64,
    /// Cost: less is better.
    pub cost: f64,
}

/// The Pareto-optimal points, with differences of up to `tolerance` (a share: 0.01 is 1 %) taken as
/// noise. Shape: `[points]`.
///
/// From the top down: among the points within the tolerance of the highest goodput, the cheapest is
/// on the front; then the same rule for those that are cheaper by more than `tolerance`, and so on.
/// So for each point, one on the front gives at most `tolerance` less at a cost of at most
/// `tolerance` more. Without tolerance these are the points that no other one beats (the first of
/// equal ones). Points without goodput are never on the front.
///
/// A relation such as "beaten by more than the tolerance" is not sufficient: through a chain of
/// small steps, each within the tolerance, the cheapest point could beat one with twice its
/// goodput.
pub fn front(points: &[Point], tolerance: f64) -> Vec<bool> {
    let more = 1.0 + tolerance;
    let mut by_cost: Vec<usize> = (0..points.len()).collect();
    by_cost.sort_by(|&a, &b| {
        let (a, b) = (&points[a], &points[b]);
        a.cost.total_cmp(&b.cost).then(b.gain.total_cmp(&a.gain))
    });
    // The highest goodput of the cheapest points. Shape: `[by_cost]`.
    let most: Vec<f64> = by_cost
        .iter()
        .scan(f64::NEG_INFINITY, |most, &at| {
            *most = most.max(points[at].gain);
            Some(*most)
        })
        .collect();
    let mut front = vec![false; points.len()];
    let mut left = by_cost.len();
    while left > 0 {
        let best = most[left - 1];
        if best <= 0.0 {
            // A point without goodput is never on the front, however cheap.
            break;
        }
        let found = by_cost[..left]
            .iter()
            .position(|&at| points[at].gain * more >= best)
            .expect("the best one is as good as itself");
        front[by_cost[found]] = true;
        let cost = points[by_cost[found]].cost;
        left = by_cost[..found].partition_point(|&at| points[at].cost * more < cost);
    }
    front
}

/// The points off the front that equal one on it, within `tolerance` in both. Shape: `[points]`.
pub fn as_good(points: &[Point], front: &[bool], tolerance: f64) -> Vec<bool> {
    let more = 1.0 + tolerance;
    let best: Vec<&Point> = points
        .iter()
        .zip(front)
        .filter_map(|(point, &on)| on.then_some(point))
        .collect();
    let near = |point: &Point| {
        best.iter()
            .any(|on| point.gain * more >= on.gain && point.cost <= on.cost * more)
    };
    points
        .iter()
        .zip(front)
        .map(|(point, &on)| !on && near(point))
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
        assert_eq!(values("a=3..5,2,4..6"), ["3", "4", "5", "2", "6"]);
        for bad in [
            "a",
            "a=",
            "=1",
            "a=1,,2",
            "a=1,2,",
            "a=,1",
            "a=1, ,2",
            "a=2,3,2",
            "a=kv, kv",
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

    proptest! {
        #[test]
        fn a_list_has_each_of_its_values_once(
            values in prop::collection::vec("(|1|2|kv|a b|\\.5)", 1..5),
            pads in prop::collection::vec("[ \t]{0,2}", 8),
        ) {
            let padded = values.iter().zip(pads.chunks(2));
            let list: Vec<String> = padded.map(|(value, pad)| [&pad[0], &**value, &pad[1]].concat()).collect();
            let read = format!("a.b={}", list.join(",")).parse::<Vary>();
            let unique: HashSet<&String> = values.iter().collect();
            if unique.len() == values.len() && values.iter().all(|value| !value.is_empty()) {
                prop_assert_eq!(read.unwrap().values, values);
            } else {
                prop_assert!(read.unwrap_err().contains("`a.b"));
            }
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

    fn points<const N: usize>(points: [(f64, f64); N]) -> [Point; N] {
        points.map(|(gain, cost)| Point { gain, cost })
    }

    #[test]
    fn the_front_is_what_nobody_beats() {
        let all = points([
            (5.0, 2.0),
            (5.0, 3.0),
            (9.0, 4.0),
            (4.0, 2.0),
            (9.0, 4.0),
            (1.0, 1.0),
        ]);
        let on = front(&all, 0.0);
        assert_eq!(on, [true, false, true, false, false, true]);
        let equal = [false, false, false, false, true, false];
        assert_eq!(as_good(&all, &on, 0.0), equal);
        assert_eq!(front(&[], 0.01), [false; 0]);
    }

    #[test]
    fn noise_does_not_make_a_front() {
        // A sweep of five sizes under a load that three of them answer: 0.03 % more is no gain.
        let all = points([
            (11.4, 0.387),
            (11.512, 0.579),
            (11.515, 0.771),
            (11.518, 0.962),
            (11.516, 1.15),
        ]);
        assert_eq!(front(&all, 0.0), [true, true, true, true, false]);
        // The second one, and not the third, which gives 1.01 % more than the first.
        assert_eq!(front(&all, 0.01), [true, true, false, false, false]);
        assert_eq!(front(&all, 0.02), [true, false, false, false, false]);
        // A cost that is 0.1 % less does not count either; much more goodput for 0.5 % more cost
        // does.
        let all = points([(10.0, 1.0), (20.0, 1.005), (19.9, 1.004)]);
        let on = front(&all, 0.01);
        assert_eq!(on, [false, false, true]);
        assert_eq!(as_good(&all, &on, 0.01), [false, true, false]);
    }

    #[test]
    fn small_steps_add_up() {
        // Each step gives 0.9 % more for 2 % more: with the cheapest alone, the last one with twice
        // the goodput would be missing.
        let steps: Vec<Point> = (0..100)
            .map(|n| Point {
                gain: 1.009f64.powi(n),
                cost: 1.02f64.powi(n),
            })
            .collect();
        let on = front(&steps, 0.01);
        let kept: Vec<f64> = steps
            .iter()
            .zip(&on)
            .filter(|s| *s.1)
            .map(|s| s.0.gain)
            .collect();
        assert_eq!(kept.len(), 50, "every other one");
        assert!(kept.last().unwrap() * 1.01 > steps.last().unwrap().gain);
    }

    proptest! {
        #[test]
        fn each_point_has_one_on_the_front_that_is_hardly_worse(
            all in prop::collection::vec((0u16..60, 1u16..60), 1..40),
            tolerance in prop::sample::select(vec![0.0, 0.01, 0.1, 0.5]),
        ) {
            let all: Vec<Point> = all
                .iter()
                .map(|&(gain, cost)| Point { gain: gain.into(), cost: cost.into() })
                .collect();
            let on = front(&all, tolerance);
            let kept: Vec<&Point> = all.iter().zip(&on).filter(|p| *p.1).map(|p| p.0).collect();
            // Products of these shares and small whole numbers are exact to the last bit or two.
            let more = (1.0 + tolerance) * (1.0 + 1e-12);
            for point in all.iter().filter(|point| point.gain > 0.0) {
                let held = kept.iter().any(|k| k.gain * more >= point.gain && k.cost <= point.cost * more);
                prop_assert!(held, "{:?} of {:?}", point, all);
            }
            prop_assert!(kept.iter().all(|point| point.gain > 0.0));
            let mut by_cost = kept;
            by_cost.sort_by(|a, b| a.cost.total_cmp(&b.cost));
            for pair in by_cost.windows(2) {
                prop_assert!(pair[1].gain > pair[0].gain);
                prop_assert!(pair[1].cost > pair[0].cost * (1.0 + tolerance));
            }
        }
    }
}
