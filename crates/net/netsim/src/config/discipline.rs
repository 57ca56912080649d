//! `switch.discipline`, and its numbers by class.

use slipstream_base::width::{floor_u32, floor_u64, to_usize};
use slipstream_config::doc::{Scalar, Table, Value};

use super::Dialect;
use crate::queueing::Discipline;

/// Numbers by class: a list of them, or pairs [class, number].
struct ByClass(Vec<f64>);

impl Scalar for ByClass {
    const MUST: &'static str =
        "a number for each class, or pairs [class, number] with each class once";
    fn read(value: &Value<'_>) -> Option<Self> {
        if let Some(list) = Vec::<f64>::read(value) {
            return Some(ByClass(list));
        }
        let pairs = Vec::<Vec<f64>>::read(value)?;
        let mut values = vec![None; pairs.len()];
        for pair in &pairs {
            let [class, number] = pair[..] else {
                return None;
            };
            if class.fract() != 0.0 || class < 0.0 {
                return None;
            }
            // A class outside of the list, or a repeated one, leaves another entry empty.
            *values.get_mut(to_usize(floor_u64(class)))? = Some(number);
        }
        values.into_iter().collect::<Option<_>>().map(ByClass)
    }
    fn to_toml(&self) -> String {
        self.0.to_toml()
    }
}

/// `discipline`, with `weights`, `priorities` or `vticks`.
pub(super) fn read(t: &Table<'_>, dialect: Dialect, notes: &mut Vec<String>) -> Discipline {
    const WORDS: &[(&str, u8)] = &[
        ("FIFO", 0),
        ("SP", 1),
        ("DRR", 2),
        ("WRR", 3),
        ("WFQ", 4),
        ("VC", 5),
        ("VirtualClock", 5),
    ];
    let kind = t.choice("discipline", WORDS).or(0);
    let used = match kind {
        1 => "priorities",
        2..=4 => "weights",
        5 => "vticks",
        _ => "",
    };
    // Days' files contain keys of other disciplines.
    for key in ["weights", "priorities", "vticks"] {
        if key != used && t.has(key) {
            let _: Option<ByClass> = t.get(key).optional();
            notes.push(format!("`switch.{key}` has no effect with this discipline"));
        }
    }
    let by_class = |key: &str, usual: Vec<f64>, fits: &dyn Fn(f64) -> bool, must: &str| {
        let values = t
            .get::<ByClass>(key)
            .check(
                |list| !list.0.is_empty() && list.0.len() <= 256 && list.0.iter().all(|&v| fits(v)),
                must,
            )
            .optional();
        match values {
            Some(values) => values.0,
            // Days has defaults for these keys; our dialect requires them.
            None if t.has(key) || dialect == Dialect::Days => usual,
            None => {
                t.error(
                    key,
                    format!("`switch.{key}` is missing"),
                    format!("give each class its number, such as {key} = [1, 2]"),
                );
                usual
            }
        }
    };
    let whole = |v: f64| v.fract() == 0.0 && (0.0..=4_294_967_295.0).contains(&v);
    let weights = || -> Vec<u32> {
        t.get::<Vec<u32>>("weights")
            .check(
                |w| {
                    !w.is_empty()
                        && w.len() <= 256
                        && w.iter().all(|&w| (1..=1_000_000).contains(&w))
                },
                "1 to 256 weights from 1 to 1000000",
            )
            .required(
                "list a weight for each class, such as weights = [1, 2]",
                vec![1],
            )
    };
    match kind {
        1 => {
            let must = "1 to 256 whole numbers, the larger first";
            let list = by_class("priorities", vec![1.0], &whole, must);
            Discipline::StrictPriority(list.into_iter().map(floor_u32).collect())
        }
        2 => Discipline::Drr(weights()),
        3 => Discipline::Wrr(weights()),
        4 => Discipline::Wfq(weights()),
        5 if dialect == Dialect::Days => {
            let must = "1 to 256 numbers of s per bit, above 0";
            let fits = |v: f64| v > 0.0 && v <= 1e6;
            Discipline::VirtualClockBits(by_class("vticks", vec![1.0], &fits, must))
        }
        5 => {
            let must = "1 to 256 whole numbers of ns per packet";
            let list = by_class("vticks", vec![1.0], &whole, must);
            Discipline::VirtualClock(list.into_iter().map(floor_u64).collect())
        }
        _ => Discipline::Fifo,
    }
}
