//! Classes of flows: those of the file, or as in Days.

use std::collections::BTreeSet;

use slipstream_base::width::to_u8;
use slipstream_config::doc::Table;

use super::Dialect;
use super::template::ParsedFlow;
use crate::queueing::{Discipline, PFC_CLASSES};
use crate::scenario::{Flow, Queue};

/// Sets the classes of flows: those of the file, or as in Days.
///
/// Days schedules a flow in class `id mod classes`, and pauses it by its 802.1Q priority. Here one
/// class serves both, and a table maps classes to priorities.
pub(super) fn settle(
    root: &Table<'_>,
    dialect: Dialect,
    mut made: Vec<ParsedFlow>,
    queue: &mut Queue,
    notes: &mut Vec<String>,
) -> Vec<Flow> {
    let classes = queue.discipline.classes() as u64;
    let fifo = queue.discipline == Discipline::Fifo;
    if dialect == Dialect::Days && !fifo {
        for made in made.iter_mut().filter(|made| !made.has_class) {
            let class = to_u8(made.flow.id % classes);
            (made.flow.class, made.flow.answer_class) = (class, class);
        }
    }
    // After an error, the discipline or the flows are not those of the file.
    if !fifo && root.error_count() == 0 {
        let beyond = |made: &&ParsedFlow| {
            made.has_class && u64::from(made.flow.class.max(made.flow.answer_class)) >= classes
        };
        if let Some(ParsedFlow { flow, .. }) = made.iter().find(beyond) {
            root.error(
                "switch",
                format!(
                    "flow {} has class {}, but `switch.discipline` has {}",
                    flow.id,
                    flow.class.max(flow.answer_class),
                    match classes {
                        1 => "one class, 0".to_owned(),
                        _ => format!("the classes 0 to {}", classes - 1),
                    }
                ),
                "lower `class` and `answer_class` of the flow, or give the discipline a number for each class",
            );
            return Vec::new();
        }
    }
    let by_priority = queue.pfc.is_some_and(|pfc| pfc.by_priority.is_some());
    if !by_priority {
        if made.iter().any(|made| made.priority > 0) {
            notes.push("`priority` has no effect without link.mode = \"Pfc\"".into());
        }
        return made.into_iter().map(|made| made.flow).collect();
    }
    let used: BTreeSet<u8> = made
        .iter()
        .flat_map(|made| [made.priority, made.answer_priority])
        .collect();
    if fifo && used.len() > 1 {
        // Order of arrival, but each priority can be paused separately.
        queue.discipline = Discipline::PriorityFifo(to_u8(PFC_CLASSES));
        for made in &mut made {
            made.flow.class = made.priority;
            made.flow.answer_class = made.answer_priority;
        }
        return made.into_iter().map(|made| made.flow).collect();
    }
    let mut of_class: [Option<u8>; 256] = [None; 256];
    for made in &made {
        let last = to_u8(classes.saturating_sub(1));
        for (class, priority) in [
            (made.flow.class, made.priority),
            (made.flow.answer_class, made.answer_priority),
        ] {
            let known = of_class[usize::from(class.min(last))].get_or_insert(priority);
            if *known != priority {
                root.error(
                    "switch",
                    format!(
                        "class {class} of the discipline has flows of priorities {known} and \
                         {priority}, which PFC must pause separately"
                    ),
                    "give the flows of a class one priority, or write discipline = \"FIFO\"",
                );
                return Vec::new();
            }
        }
    }
    if of_class[PFC_CLASSES..].iter().any(Option::is_some) {
        root.error(
            "switch",
            "PFC has 8 classes, and the file uses more",
            "use at most 8 classes with link.mode = \"Pfc\"",
        );
    }
    for (class, priority) in queue.priorities.iter_mut().zip(of_class) {
        *class = priority.unwrap_or(*class);
    }
    made.into_iter().map(|made| made.flow).collect()
}
