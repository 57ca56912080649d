//! Equality of JSON values, as JSON Schema defines it.

use slipstream_base::width::round_i64;

use crate::keywords::number;
use crate::{Number, Tree};

/// A text that two values share exactly if they are equal in JSON Schema: `1` is `1.0`, and members have no order.
pub(crate) fn canonical(value: &Tree) -> String {
    fn sorted(value: &Tree) -> Tree {
        match value {
            Tree::Number(n) => Tree::Number(whole(n)),
            Tree::Array(elements) => Tree::Array(elements.iter().map(sorted).collect()),
            Tree::Object(members) => {
                let members = members.iter().map(|(n, v)| (n.clone(), sorted(v)));
                let mut members: Vec<_> = members.collect();
                members.sort_by(|a, b| a.0.cmp(&b.0));
                Tree::Object(members)
            }
            other => other.clone(),
        }
    }
    let mut out = String::new();
    sorted(value).write(&mut out);
    out
}

/// Whether two values are equal in JSON Schema.
pub(crate) fn same(one: &Tree, other: &Tree) -> bool {
    match (one, other) {
        (Tree::Number(one), Tree::Number(other)) => whole(one) == whole(other),
        (Tree::Array(one), Tree::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(a, b)| same(a, b))
        }
        (Tree::Object(members), Tree::Object(others)) => {
            members.len() == others.len()
                && members
                    .iter()
                    .all(|(name, value)| other.get(name).is_some_and(|known| same(value, known)))
        }
        (one, other) => one == other,
    }
}

/// `n` without a fraction that is 0.
fn whole(n: &Number) -> Number {
    let value = number(n);
    if n.as_i64().is_none() && n.as_u64().is_none() && value.fract() == 0.0 && value.abs() < 9e18 {
        return round_i64(value).into();
    }
    n.clone()
}
