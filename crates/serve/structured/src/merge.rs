//! One schema that demands what two schemas demand.

use std::collections::HashSet;

use crate::keywords::{ANNOTATIONS, number, weight};
use crate::{Tree, work};

/// The keywords whose schemas depend on keywords next to them in their own subschema, as pairs: schemas of named
/// members, and the schema of the rest.
const DEPENDENT: [[&str; 2]; 2] = [
    ["properties", "additionalProperties"],
    ["prefixItems", "items"],
];

/// Whether the pair's schemas must be joined together: one alone would mean something else.
fn joins(pair: [&str; 2], one: &Tree, other: &Tree) -> bool {
    let has = |name| one.get(name).is_some() || other.get(name).is_some();
    match pair {
        ["properties", rest] => has(rest),
        [named, rest] => has(named) || has(rest),
    }
}

/// Values of schemas that are copied when the two are [`merged`].
pub(crate) fn merge_work(one: &Tree, other: &Tree) -> u32 {
    let mut all = weight(one).saturating_add(weight(other));
    if !matches!((one, other), (Tree::Object(_), Tree::Object(_))) {
        return all;
    }
    // The schemas of other members are copied to each member that only the other subschema names.
    for pair in DEPENDENT {
        let of = |name| [one.get(name), other.get(name)].into_iter().flatten();
        let names: usize = of(pair[0]).map(members_of).sum();
        let copied: u32 = of(pair[1]).map(weight).sum();
        if joins(pair, one, other) {
            all = all.saturating_add(copied.saturating_mul(work(names / 4)));
        }
    }
    all
}

/// A schema that demands what both do.
///
/// # Errors
/// The reason, if a keyword is demanded twice, and the two values cannot be joined.
pub(crate) fn merged(one: &Tree, other: &Tree) -> Result<Tree, String> {
    let (members, more) = match (one, other) {
        (Tree::Bool(true), rest) | (rest, Tree::Bool(true)) => return Ok(rest.clone()),
        (Tree::Object(one), Tree::Object(other)) => (one, other),
        _ => return Ok(Tree::Bool(false)),
    };
    let mut whole = members.clone();
    let [objects, arrays] = DEPENDENT.map(|pair| joins(pair, one, other));
    if objects {
        whole.retain(|(n, _)| !DEPENDENT[0].contains(&n.as_str()));
        whole.extend(joined_properties(one, other));
    }
    if arrays {
        whole.retain(|(n, _)| !DEPENDENT[1].contains(&n.as_str()));
        whole.extend(joined_items(one, other));
    }
    for (name, value) in more {
        match name.as_str() {
            "properties" | "additionalProperties" if objects => continue,
            "prefixItems" | "items" if arrays => continue,
            _ => {}
        }
        let Some(known) = whole.iter_mut().find(|(n, _)| n == name) else {
            whole.push((name.clone(), value.clone()));
            continue;
        };
        if known.1 == *value || ANNOTATIONS.contains(&name.as_str()) {
            continue;
        }
        known.1 = both(name, &known.1, value)?;
    }
    Ok(Tree::Object(whole))
}

/// The value of keyword `name` that demands what both values do.
fn both(name: &str, one: &Tree, other: &Tree) -> Result<Tree, String> {
    let clash = || format!("`{name}` is demanded twice, and the two cannot be joined");
    match (name, one, other) {
        ("properties", Tree::Object(one), Tree::Object(other)) => {
            let mut whole = one.clone();
            for (property, schema) in other {
                match whole.iter_mut().find(|(n, _)| n == property) {
                    None => whole.push((property.clone(), schema.clone())),
                    Some(known) => known.1 = all_of(&known.1, schema),
                }
            }
            Ok(Tree::Object(whole))
        }
        ("required", Tree::Array(one), Tree::Array(other)) => {
            let mut whole = one.clone();
            whole.extend(other.iter().filter(|name| !one.contains(name)).cloned());
            Ok(Tree::Array(whole))
        }
        ("allOf", Tree::Array(one), Tree::Array(other)) => {
            Ok(Tree::Array(one.iter().chain(other).cloned().collect()))
        }
        ("enum", Tree::Array(one), Tree::Array(other)) => {
            let both = one.iter().filter(|value| other.contains(value));
            Ok(Tree::Array(both.cloned().collect()))
        }
        (
            "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties",
            Tree::Number(one),
            Tree::Number(other),
        ) => {
            let first = number(one) >= number(other);
            Ok(Tree::Number(if first { one } else { other }.clone()))
        }
        (
            "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties",
            Tree::Number(one),
            Tree::Number(other),
        ) => {
            let first = number(one) <= number(other);
            Ok(Tree::Number(if first { one } else { other }.clone()))
        }
        ("type", one, other) => joined_types(one, other).ok_or_else(clash),
        ("uniqueItems", Tree::Bool(one), Tree::Bool(other)) => Ok(Tree::Bool(*one || *other)),
        _ => Err(clash()),
    }
}

/// The value of `type` that allows what both values allow; `None`: nothing.
fn joined_types(one: &Tree, other: &Tree) -> Option<Tree> {
    let list = |tree: &Tree| match tree {
        Tree::Array(some) => some.clone(),
        one => vec![one.clone()],
    };
    let (one, other) = (list(one), list(other));
    let integer = Tree::Text("integer".into());
    let number = Tree::Text("number".into());
    let mut both: Vec<Tree> = one.iter().filter(|t| other.contains(t)).cloned().collect();
    let is_whole = |a: &[Tree], b: &[Tree]| a.contains(&integer) && b.contains(&number);
    if (is_whole(&one, &other) || is_whole(&other, &one)) && !both.contains(&integer) {
        both.push(integer.clone());
    }
    (!both.is_empty()).then_some(Tree::Array(both))
}

/// Members or elements of `value`.
fn members_of(value: &Tree) -> usize {
    match value {
        Tree::Array(elements) => elements.len(),
        Tree::Object(members) => members.len(),
        _ => 0,
    }
}

/// A schema that both hold for.
fn all_of(one: &Tree, other: &Tree) -> Tree {
    match (one, other) {
        (Tree::Bool(true), rest) | (rest, Tree::Bool(true)) => rest.clone(),
        (Tree::Bool(false), _) | (_, Tree::Bool(false)) => Tree::Bool(false),
        (one, other) if one == other => one.clone(),
        (one, other) => {
            let both = vec![one.clone(), other.clone()];
            Tree::Object(vec![("allOf".into(), Tree::Array(both))])
        }
    }
}

/// `properties` and `additionalProperties` that demand what those of both schemas do.
fn joined_properties(one: &Tree, other: &Tree) -> [(String, Tree); 2] {
    let any = Tree::Bool(true);
    let of = |schema: &Tree, name: &str| {
        let own = schema.get("properties").and_then(|all| all.get(name));
        own.or(schema.get("additionalProperties"))
            .unwrap_or(&any)
            .clone()
    };
    let mut properties: Vec<(String, Tree)> = Vec::new();
    let mut known = HashSet::new();
    for schema in [one, other] {
        if let Some(Tree::Object(members)) = schema.get("properties") {
            for (name, _) in members {
                if known.insert(name) {
                    properties.push((name.clone(), all_of(&of(one, name), &of(other, name))));
                }
            }
        }
    }
    let rest = |schema: &Tree| schema.get("additionalProperties").unwrap_or(&any).clone();
    [
        ("properties".into(), Tree::Object(properties)),
        (
            "additionalProperties".into(),
            all_of(&rest(one), &rest(other)),
        ),
    ]
}

/// `prefixItems` and `items` that demand what those of both schemas do.
fn joined_items(one: &Tree, other: &Tree) -> Vec<(String, Tree)> {
    let any = Tree::Bool(true);
    let first = |schema: &Tree| match schema.get("prefixItems") {
        Some(Tree::Array(first)) => first.clone(),
        _ => Vec::new(),
    };
    let rest = |schema: &Tree| schema.get("items").unwrap_or(&any).clone();
    let (left, right) = (first(one), first(other));
    let (left_rest, right_rest) = (rest(one), rest(other));
    let both: Vec<Tree> = (0..left.len().max(right.len()))
        .map(|at| {
            all_of(
                left.get(at).unwrap_or(&left_rest),
                right.get(at).unwrap_or(&right_rest),
            )
        })
        .collect();
    let mut made = vec![("items".into(), all_of(&left_rest, &right_rest))];
    if !both.is_empty() {
        made.push(("prefixItems".into(), Tree::Array(both)));
    }
    made
}
