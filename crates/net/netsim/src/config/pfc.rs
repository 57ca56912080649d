//! `[link.pfc]` of Days and `[switch.pfc]`: pauses.

use slipstream_base::width::{to_u16, to_u32};
use slipstream_config::doc::{Scalar, Table, Value};

use crate::queueing::{PFC_CLASSES, Pfc, Thresholds};
use crate::scenario::Queue;

/// Eight numbers, one per priority of 802.1Q.
struct Eight([u64; PFC_CLASSES]);

impl Scalar for Eight {
    const MUST: &'static str = "eight numbers, one for each priority from 0 to 7";
    fn read(value: &Value<'_>) -> Option<Self> {
        Vec::<u64>::read(value)?.try_into().ok().map(Eight)
    }
    fn to_toml(&self) -> String {
        self.0.to_vec().to_toml()
    }
}

/// `link.mode` and `[link.pfc]` of Days.
pub(super) fn read_link(t: &Table<'_>, queue: &mut Queue, notes: &mut Vec<String>) {
    let on = t
        .choice("mode", &[("None", false), ("Pfc", true)])
        .or(false);
    if !on {
        t.refuse(
            "pfc",
            "has no effect without mode = \"Pfc\"",
            "add mode = \"Pfc\" to [link], or remove [link.pfc]",
        );
        return;
    }
    if queue.pfc.is_some() {
        t.error(
            "mode",
            "`link.mode` and `switch.pfc` both configure pauses",
            "remove one of them",
        );
    }
    if queue.trim.is_some() {
        t.error(
            "mode",
            "`link.mode` is Pfc, but trimming ports have two queues of their own",
            "choose another `switch.drop`",
        );
    }
    queue.pfc = t.table("pfc", |t| {
        let (classes, thresholds) = read_thresholds(t, notes);
        let host_links: bool = t.get("host_links").or(false);
        (classes != 0).then_some(Pfc {
            xoff_bytes: Some(u64::MAX),
            alpha: 1.0,
            xon_gap_bytes: 0,
            headroom_bytes: Some(0),
            classes,
            quanta: None,
            refresh: 0,
            by_priority: Some(thresholds),
            host_links,
        })
    });
}

/// The thresholds of each priority in `[link.pfc]`, and those that it pauses, as bits.
fn read_thresholds(t: &Table<'_>, notes: &mut Vec<String>) -> (u8, [Thresholds; PFC_CLASSES]) {
    let eight = |key: &str, usual: u64| t.get::<Eight>(key).or(Eight([usual; PFC_CLASSES])).0;
    // The defaults of Days.
    let (xoff, xon) = (eight("xoff", 65_536), eight("xon", 49_152));
    let (capacity, quanta) = (eight("buffer_capacity", 0), eight("pause_quanta", 65_535));
    for key in ["by_tier", "headroom_by_rate"] {
        t.refuse(
            key,
            "is not supported: thresholds by tier or rate are not modeled",
            "give `xoff`, `xon` and `buffer_capacity` for all switches",
        );
    }
    for key in ["pause_quanta", "refresh_interval", "drain_interval"] {
        if t.has(key) {
            let _: Option<f64> = (key != "pause_quanta")
                .then(|| t.get(key).optional())
                .flatten();
            notes.push(format!(
                "`link.pfc.{key}` has no effect: a pause lasts until it is revoked, as in Days' \
                 newer engine"
            ));
        }
    }
    let mut classes = 0u8;
    let mut thresholds = [Thresholds {
        xoff_bytes: u64::MAX,
        xon_bytes: 0,
        capacity_bytes: u64::MAX,
    }; PFC_CLASSES];
    for p in 0..PFC_CLASSES {
        // 0 disables PFC for a priority.
        if xoff[p] == 0 || quanta[p] == 0 {
            continue;
        }
        let limit = if capacity[p] == 0 {
            u64::MAX
        } else {
            capacity[p]
        };
        if xon[p] >= xoff[p] || xoff[p] > limit {
            t.error(
                "xoff",
                format!(
                    "priority {p} has xon {}, xoff {} and buffer_capacity {}",
                    xon[p], xoff[p], capacity[p]
                ),
                "they must rise: xon < xoff <= buffer_capacity (0: no limit)",
            );
        }
        classes |= 1 << p;
        thresholds[p] = Thresholds {
            xoff_bytes: xoff[p],
            xon_bytes: xon[p],
            capacity_bytes: limit,
        };
    }
    (classes, thresholds)
}

pub(super) fn read(t: &Table<'_>, shared: bool) -> Pfc {
    let xoff_bytes: Option<u64> = t.get("xoff").within(0..=1u64 << 40).optional();
    if !t.has("xoff") && !shared {
        t.error(
            "xoff",
            "`switch.pfc` has neither a threshold nor a shared buffer to derive one from",
            "give `xoff` in bytes, or `switch.shared`",
        );
    }
    if xoff_bytes.is_some() {
        t.refuse(
            "alpha",
            "conflicts with `xoff`: both set the bytes at which a link is paused",
            "keep `xoff` for a fixed threshold, or `alpha` for a share of the free bytes of `switch.shared`",
        );
    }
    let classes: Vec<u32> = t.get("classes").or((0..to_u32(PFC_CLASSES)).collect());
    if classes.is_empty() || classes.iter().any(|&c| c as usize >= PFC_CLASSES) {
        t.error(
            "classes",
            "PFC has the classes 0 to 7",
            "list those that are lossless, such as classes = [0]",
        );
    }
    let quanta: Option<u32> = t.get("quanta").within(1..=0xffff).optional();
    let quanta = quanta.map(to_u16);
    if quanta.is_none() && t.has("refresh") {
        t.error(
            "refresh",
            "`switch.pfc.refresh` is given, but a pause without `quanta` lasts until it is revoked",
            "give `quanta` too, such as quanta = 65535, or remove `refresh`",
        );
    }
    Pfc {
        quanta,
        // Twice as often as needed, so that one late frame is harmless.
        refresh: t
            .get("refresh")
            .within(0..=0xffff)
            .or(quanta.map_or(0, |q| q.div_ceil(2))),
        xoff_bytes,
        alpha: t.get("alpha").within(1e-3..=1e3).or(1.0),
        xon_gap_bytes: t
            .get("xon_gap")
            .within(0..=xoff_bytes.unwrap_or(1 << 40))
            .or(0),
        headroom_bytes: t.get("headroom").within(0..=1u64 << 40).optional(),
        classes: classes
            .iter()
            .filter(|&&c| (c as usize) < PFC_CLASSES)
            .fold(0, |mask, c| mask | 1 << c),
        by_priority: None,
        host_links: true,
    }
}
