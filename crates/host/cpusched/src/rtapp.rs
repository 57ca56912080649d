//! Workloads from rt-app's JSON: `tasks` with `instance`, `loop`, `phases`, `run` (us), `sleep`
//! (us), `timer` (`period`, us), `lock`, `unlock`, `resume`, `suspend`, `cpus` (any set) and `priority`
//! (nice). `global` and `resources` are accepted and ignored. Anything else is an error, because a
//! workload that silently lost a part would measure something else.
//!
//! Source: rt-app's `doc/tutorial.txt`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use slipstream_base::width::{floor_u32, to_i32, to_u32, to_usize};

use crate::machine::{CpuMask, Machine, Mechanism};
use crate::workload::{Op, Span, TaskSpec, Workload};

/// Why an rt-app file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum RtAppError {
    /// Not JSON.
    #[error("not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An invalid key or value.
    #[error("{at}: {what}")]
    Bad {
        /// The place, as a path of keys.
        at: String,
        /// The error, and the valid values.
        what: String,
    },
}

fn bad<T>(at: &str, what: impl Into<String>) -> Result<T, RtAppError> {
    Err(RtAppError::Bad {
        at: at.to_owned(),
        what: what.into(),
    })
}

/// Maximum operations of one task's script; loops are unrolled.
const OPS_MAX: usize = 100_000;

/// JSON whose objects keep their order: events happen in the file's order, and
/// `serde_json::Map` sorts its keys.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Object(Vec<(String, Value)>),
    Array(Vec<Value>),
    Text(String),
    Int(i64),
    Other,
}

impl Value {
    fn as_object(&self) -> Option<&[(String, Value)]> {
        match self {
            Value::Object(entries) => Some(entries),
            _ => None,
        }
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.as_object()?
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v)
    }

    fn as_i64(&self) -> Option<i64> {
        match self {
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Value, D::Error> {
        struct Json;
        impl<'de> Visitor<'de> for Json {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_i64<E>(self, n: i64) -> Result<Value, E> {
                Ok(Value::Int(n))
            }
            fn visit_u64<E>(self, n: u64) -> Result<Value, E> {
                Ok(i64::try_from(n).map_or(Value::Other, Value::Int))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_str<E>(self, s: &str) -> Result<Value, E> {
                Ok(Value::Text(s.to_owned()))
            }
            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Other)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut a: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = a.next_element()? {
                    items.push(item);
                }
                Ok(Value::Array(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut a: A) -> Result<Value, A::Error> {
                let mut entries: Vec<(String, Value)> = Vec::new();
                while let Some((key, value)) = a.next_entry::<String, Value>()? {
                    if entries.iter().any(|(k, _)| *k == key) {
                        return Err(A::Error::custom(format!(
                            "key `{key}` twice in one object; number them: `{key}0`, `{key}1`"
                        )));
                    }
                    entries.push((key, value));
                }
                Ok(Value::Object(entries))
            }
        }
        d.deserialize_any(Json)
    }
}

#[derive(Default)]
struct Names {
    locks: BTreeMap<String, u32>,
    channels: BTreeMap<String, u32>,
}

fn number(names: &mut BTreeMap<String, u32>, name: &str) -> u32 {
    let next = to_u32(names.len());
    *names.entry(name.to_owned()).or_insert(next)
}

/// Reads an rt-app file.
///
/// # Errors
/// The place, the error and the valid values.
pub fn parse(text: &str, machine: Machine) -> Result<Workload, RtAppError> {
    let root: Value = serde_json::from_str(text)?;
    let Some(entries) = root.as_object() else {
        return bad("file", "must be an object");
    };
    for (key, _) in entries {
        if !matches!(key.as_str(), "tasks" | "global" | "resources") {
            return bad(key, "unknown; known are `tasks`, `global` and `resources`");
        }
    }
    let Some(tasks) = root.get("tasks").and_then(Value::as_object) else {
        return bad("tasks", "missing; it must be an object of tasks");
    };
    let mut names = Names::default();
    let mut w = Workload::default();
    for (name, task) in tasks {
        add_task(&mut w, &mut names, name, task, machine)?;
    }
    w.channels = to_u32(names.channels.len());
    w.locks = to_u32(names.locks.len());
    Ok(w)
}

/// Keys of a task other than its events.
struct Attributes {
    instances: u64,
    weight: u32,
    cpus: Option<Vec<u32>>,
    /// How often the script runs; `None`: for ever.
    times: Option<usize>,
    /// The events of a task without phases.
    body: Vec<(String, Value)>,
}

fn attributes(
    at: &str,
    task: &Value,
    entries: &[(String, Value)],
    machine: Machine,
) -> Result<Attributes, RtAppError> {
    let mut read = Attributes {
        instances: 1,
        weight: 100,
        cpus: None,
        times: None,
        body: Vec::new(),
    };
    for (key, value) in entries {
        let at = format!("{at}.{key}");
        match key.as_str() {
            "instance" => read.instances = uint(&at, value, 10_000)?,
            "priority" => read.weight = nice_weight(&at, value)?,
            "cpus" => read.cpus = Some(cpu_set(&at, value, machine)?),
            "policy" if *value == Value::Text("SCHED_OTHER".into()) => {}
            "policy" => return bad(&at, "only SCHED_OTHER is simulated"),
            "loop" | "phases" => {}
            _ => read.body.push((key.clone(), value.clone())),
        }
    }
    match task.get("loop").map(Value::as_i64) {
        None | Some(Some(-1 | i64::MAX)) => {}
        Some(Some(n)) if n > 0 => read.times = Some(to_usize(n)),
        _ => return bad(&format!("{at}.loop"), "must be -1 or a positive count"),
    }
    Ok(read)
}

/// Adds the ops of `phases`.
fn add_phases(
    at: &str,
    phases: &[(String, Value)],
    names: &mut Names,
    script: &mut Vec<Op>,
) -> Result<(), RtAppError> {
    for (phase, body) in phases {
        let at = format!("{at}.phases.{phase}");
        let Some(body) = body.as_object() else {
            return bad(&at, "must be an object");
        };
        let (repeat, body): (Vec<_>, Vec<_>) =
            body.iter().cloned().partition(|(key, _)| key == "loop");
        let times = match repeat.first() {
            None => 1,
            Some((_, n)) => uint(&format!("{at}.loop"), n, OPS_MAX as u64)?,
        };
        let mut ops = Vec::new();
        events(&at, &body, names, &mut ops)?;
        for _ in 0..times {
            script.extend(ops.iter().cloned());
            if script.len() > OPS_MAX {
                return bad(&at, format!("makes more than {OPS_MAX} steps; loop less"));
            }
        }
    }
    Ok(())
}

fn add_task(
    w: &mut Workload,
    names: &mut Names,
    name: &str,
    task: &Value,
    machine: Machine,
) -> Result<(), RtAppError> {
    let at = format!("tasks.{name}");
    let Some(entries) = task.as_object() else {
        return bad(&at, "must be an object");
    };
    let Attributes {
        instances,
        weight,
        cpus,
        times,
        body,
    } = attributes(&at, task, entries, machine)?;
    let mut script = Vec::new();
    match (task.get("phases"), body.first()) {
        (Some(_), Some((key, _))) => {
            return bad(
                &format!("{at}.{key}"),
                "cannot be combined with `phases`; put it into a phase",
            );
        }
        (Some(phases), None) => {
            let Some(phases) = phases.as_object() else {
                return bad(&format!("{at}.phases"), "must be an object of phases");
            };
            add_phases(&at, phases, names, &mut script)?;
        }
        (None, _) => events(&at, &body, names, &mut script)?,
    }
    if script.is_empty() {
        return bad(&at, "does nothing; give it a `run` or a `sleep`");
    }
    if let Some(times) = times {
        let ops = script.len().saturating_mul(times);
        if ops > OPS_MAX {
            return bad(
                &format!("{at}.loop"),
                format!("makes more than {OPS_MAX} steps; use -1"),
            );
        }
        script = script.iter().cloned().cycle().take(ops).collect();
        script.push(Op::Exit);
    }
    let group = w.group(name);
    let script: Arc<[Op]> = script.into();
    let mask = cpus.as_ref();
    let mask = mask.map_or(CpuMask::ALL, |c| CpuMask::of(c.iter().copied()));
    for i in 0..instances {
        let spread = w.tasks.len() + to_usize(i) * 7;
        let home = match &cpus {
            Some(cpus) => cpus[spread % cpus.len()],
            None => to_u32(spread) % machine.cpus(),
        };
        w.tasks.push(TaskSpec {
            group,
            script: script.clone(),
            weight,
            mask: mask.clone(),
            cgroup: None,
            home,
        });
    }
    Ok(())
}

fn events(
    at: &str,
    body: &[(String, Value)],
    names: &mut Names,
    ops: &mut Vec<Op>,
) -> Result<(), RtAppError> {
    for (key, value) in body {
        let at = format!("{at}.{key}");
        // Keys of one object must differ, so rt-app allows digits after the event's name.
        let event = key.trim_end_matches(|c: char| c.is_ascii_digit());
        let name = || match value {
            Value::Text(s) => Ok(s.as_str()),
            _ => bad(&at, "must be a name"),
        };
        match event {
            "run" | "runtime" => {
                ops.push(Op::Run(Span::Fixed(uint(&at, value, 1 << 40)? * 1_000)));
            }
            "sleep" => ops.push(Op::Sleep(Span::Fixed(uint(&at, value, 1 << 40)? * 1_000))),
            "timer" => {
                let Some(period) = value.get("period") else {
                    return bad(&at, "needs a `period`");
                };
                let period = uint(&format!("{at}.period"), period, 1 << 40)?.max(1);
                ops.push(Op::Timer(period * 1_000));
            }
            "lock" => ops.push(Op::Lock(number(&mut names.locks, name()?))),
            "unlock" => ops.push(Op::Unlock(number(&mut names.locks, name()?))),
            "suspend" => ops.push(Op::Recv(number(&mut names.channels, name()?))),
            // rt-app resumes by a condition variable, that is a futex.
            "resume" => {
                ops.push(Op::Send(
                    number(&mut names.channels, name()?),
                    Mechanism::Futex,
                ));
            }
            _ => {
                return bad(
                    &at,
                    "unknown; known are run, sleep, timer, lock, unlock, suspend and resume",
                );
            }
        }
    }
    Ok(())
}

fn uint(at: &str, v: &Value, most: u64) -> Result<u64, RtAppError> {
    match v.as_i64().map(u64::try_from) {
        Some(Ok(n)) if n <= most => Ok(n),
        _ => bad(at, format!("must be a whole number from 0 to {most}")),
    }
}

fn cpu_set(at: &str, v: &Value, machine: Machine) -> Result<Vec<u32>, RtAppError> {
    let last = machine.cpus() - 1;
    let wrong = || bad(at, format!("must be a list of CPUs of 0 to {last}"));
    let Value::Array(items) = v else {
        return wrong();
    };
    let cpu = |v: &Value| {
        v.as_i64()
            .and_then(|c| u32::try_from(c).ok())
            .filter(|&c| c <= last)
    };
    match items.iter().map(cpu).collect::<Option<Vec<u32>>>() {
        Some(cpus) if !cpus.is_empty() => Ok(cpus),
        _ => wrong(),
    }
}

/// Weight of a nice value, 100 for 0: each step is a factor of 1.25, as `sched_prio_to_weight`.
fn nice_weight(at: &str, v: &Value) -> Result<u32, RtAppError> {
    match v.as_i64() {
        Some(nice @ -20..=19) => Ok(floor_u32(
            (100.0 * 1.25f64.powi(-to_i32(nice))).round().max(1.0),
        )),
        _ => bad(at, "must be a nice value, -20 to 19"),
    }
}
