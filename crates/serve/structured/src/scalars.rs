//! Numbers within bounds, words, and texts in a format.

use slipstream_base::width::{floor_u64, round_i64, to_i64, to_u8};

use crate::keywords::bound;
use crate::{Rng, Tree};

/// Words of modelled strings.
const WORDS: [&str; 32] = [
    "amber", "basin", "cedar", "delta", "ember", "field", "grove", "harbor", "island", "jasper",
    "kernel", "lantern", "meadow", "north", "orbit", "pebble", "quartz", "river", "summit",
    "timber", "umbra", "valley", "willow", "yarrow", "zephyr", "anchor", "bridge", "copper",
    "drift", "engine", "forest", "garden",
];

/// A word of modelled strings.
pub(crate) fn word(rng: &mut Rng) -> &'static str {
    WORDS[rng.index(WORDS.len())]
}

/// Some words, of a length from `least` to `most`.
pub(crate) fn words(least: usize, most: usize, rng: &mut Rng) -> String {
    let words = 1 + rng.below(4);
    let mut text = String::new();
    let mut count = 0;
    while count < words || text.len() < least {
        if count > 0 {
            text.push(' ');
        }
        text.push_str(word(rng));
        count += 1;
    }
    text.truncate(most); // all of it is ASCII
    text
}

/// Some letters, of a length from `least` to `most`: they differ more often than words.
pub(crate) fn letters(least: usize, most: usize, rng: &mut Rng) -> String {
    let count = least.max(12).min(most);
    (0..count)
        .map(|_| char::from(b'a' + to_u8(rng.below(26))))
        .collect()
}

/// A text in a format that the specification defines; other formats are annotations.
pub(crate) fn by_format(format: &str, rng: &mut Rng) -> Option<String> {
    let mut two = |from: u64, count: u64| format!("{:02}", from + rng.below(count));
    let date = format!("20{}-{}-{}", two(10, 20), two(1, 12), two(1, 28));
    let time = format!("{}:{}:{}Z", two(0, 24), two(0, 60), two(0, 60));
    Some(match format {
        "date-time" => format!("{date}T{time}"),
        "date" => date,
        "time" => time,
        "duration" => format!("P{}D", 1 + rng.below(30)),
        "email" | "idn-email" => format!("{}@example.com", word(rng)),
        "hostname" | "idn-hostname" => format!("{}.example.com", word(rng)),
        "ipv4" => format!("192.0.2.{}", 1 + rng.below(254)),
        "ipv6" => format!("2001:db8::{:x}", 1 + rng.below(0xfffe)),
        "uri" | "iri" | "uri-reference" | "iri-reference" | "url" => {
            format!("https://example.com/{}", word(rng))
        }
        "uuid" => {
            let (high, low) = (rng.below(u64::MAX), rng.below(u64::MAX));
            format!(
                "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
                high >> 32,
                high & 0xffff,
                low & 0xfff,
                low >> 12 & 0xfff,
                low >> 16
            )
        }
        "json-pointer" => format!("/{}", word(rng)),
        _ => return None,
    })
}

/// An integer that satisfies the bounds of `schema`.
///
/// # Errors
/// The reason, if there is none.
pub(crate) fn integer(schema: &Tree, rng: &mut Rng) -> Result<String, String> {
    /// Whole numbers up to this are exact as `f64`, and as numbers of JavaScript.
    const EXACT: f64 = 9_007_199_254_740_991.0;
    let low = [
        bound(schema, "minimum")?.map(f64::ceil),
        bound(schema, "exclusiveMinimum")?.map(|b| b.floor() + 1.0),
    ];
    let high = [
        bound(schema, "maximum")?.map(f64::floor),
        bound(schema, "exclusiveMaximum")?.map(|b| b.ceil() - 1.0),
    ];
    let low = low.into_iter().flatten().reduce(f64::max);
    let high = high.into_iter().flatten().reduce(f64::min);
    let step = bound(schema, "multipleOf")?.unwrap_or(1.0);
    if step <= 0.0 || step.fract() != 0.0 {
        return Err("`multipleOf` of an integer must be a whole number above 0".into());
    }
    let span = 100.0 * step;
    let (low, high) = match (low, high) {
        (Some(low), Some(high)) => (low, high),
        (Some(low), None) => (low, low + span),
        (None, Some(high)) => ((high - span).max(0.0).min(high), high),
        (None, None) => (0.0, span),
    };
    let (low, high) = ((low / step).ceil(), (high / step).floor());
    if low > high || low.abs() * step > EXACT || high.abs() * step > EXACT {
        return Err("no integer of up to 53 bits is within the bounds".into());
    }
    let drawn = round_i64(low) + to_i64(rng.below(floor_u64(high - low) + 1));
    Ok((drawn * round_i64(step)).to_string())
}

/// A number that satisfies the bounds of `schema`.
///
/// # Errors
/// The reason, if there is none.
pub(crate) fn number(schema: &Tree, rng: &mut Rng) -> Result<String, String> {
    if let Some(step) = bound(schema, "multipleOf")? {
        if step.fract() == 0.0 {
            return integer(schema, rng);
        }
        return Err("`multipleOf` with a fraction is not modelled".into());
    }
    let (floor, above) = (
        bound(schema, "minimum")?,
        bound(schema, "exclusiveMinimum")?,
    );
    let (ceiling, under) = (
        bound(schema, "maximum")?,
        bound(schema, "exclusiveMaximum")?,
    );
    let low = [floor, above].into_iter().flatten().reduce(f64::max);
    let high = [ceiling, under].into_iter().flatten().reduce(f64::min);
    let (low, high) = match (low, high) {
        (Some(low), Some(high)) => (low, high),
        (Some(low), None) => (low, low + 100.0),
        (None, Some(high)) => ((high - 100.0).max(0.0).min(high), high),
        (None, None) => (0.0, 100.0),
    };
    let holds = |value: f64| {
        floor.is_none_or(|b| value >= b)
            && above.is_none_or(|b| value > b)
            && ceiling.is_none_or(|b| value <= b)
            && under.is_none_or(|b| value < b)
    };
    let drawn = low + rng.unit() * (high - low);
    let short = (drawn * 100.0).round() / 100.0;
    let value = [short, drawn, low + (high - low) / 2.0, low, high]
        .into_iter()
        .find(|value| value.is_finite() && holds(*value))
        .ok_or("no number is within the bounds")?;
    let mut text = format!("{value:?}");
    if !text.contains(['.', 'e']) {
        text.push_str(".0");
    }
    Ok(text)
}
