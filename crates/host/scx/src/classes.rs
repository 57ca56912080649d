//! The class file: groups of threads, and their scheduling parameters.
//!
//! ```toml
//! [class.engine]
//! comm = ["EngineCore*"]         # thread names; a final * matches any rest
//! weight = 300                   # 1 to 10000; 100 is the weight of nice 0
//! slice_us = 3000                # longest slice
//! cpus = "0-15"                  # the LLCs that hold these CPUs
//! hand_off = false               # prefers an idle CPU to its waker's
//!
//! [class.background]
//! cgroup = ["system.slice/*"]    # path of the cgroup below its root
//! weight = 10
//! ```
//!
//! A thread's class is the first class of the file with a rule that matches; a thread without one is
//! scheduled with the defaults.

use std::collections::BTreeSet;

use serde::Deserialize;

use crate::topology::{Topology, parse_cpu_list};

/// Maximum classes of a file: the size of the BPF program's table.
pub const CLASSES_MAX: usize = 32;
/// Maximum rules of a file.
pub const RULES_MAX: usize = 128;
/// Maximum length of a thread name in the kernel.
pub const COMM_MAX: usize = 15;

/// The attribute that a rule compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The thread's name.
    Comm,
    /// Its cgroup's path, without the first slash.
    Cgroup,
}

/// Assigns threads to a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The compared attribute.
    pub subject: Subject,
    /// The expected text.
    pub text: String,
    /// Whether only the beginning is compared.
    pub is_prefix: bool,
    /// Index into [`Classes::classes`].
    pub class: usize,
}

/// Scheduling parameters of a class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Class {
    /// Its name in the file.
    pub name: String,
    /// Weight, 1 to 10000; `None`: that of the thread's nice value.
    pub weight: Option<u32>,
    /// Longest slice, us.
    pub slice_us: Option<u32>,
    /// Bit per LLC that it may use; 0 for all.
    pub llc_mask: u64,
    /// Whether its threads may be handed off to their wakers' CPUs.
    pub hand_off: bool,
}

/// A class file, checked against a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    /// Classes in the file's order.
    pub classes: Vec<Class>,
    /// Rules in the order in which they are tried.
    pub rules: Vec<Rule>,
}

/// Why a class file is rejected.
#[derive(Debug, thiserror::Error)]
pub enum ClassError {
    /// Not TOML, or an unknown or ill-typed key. The text names the place.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// All invalid values, one per line.
    #[error("{}", .0.join("\n"))]
    Values(Vec<String>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    class: toml::Table,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassFile {
    #[serde(default)]
    comm: Vec<String>,
    #[serde(default)]
    cgroup: Vec<String>,
    weight: Option<u32>,
    slice_us: Option<u32>,
    cpus: Option<String>,
    #[serde(default = "yes")]
    hand_off: bool,
}

fn yes() -> bool {
    true
}

impl Classes {
    /// Reads a class file for a host.
    ///
    /// # Errors
    /// All invalid values together: the class, its value, the valid values.
    pub fn parse(text: &str, host: &Topology) -> Result<Classes, ClassError> {
        Classes::parse_without(text, host, &BTreeSet::new())
    }

    /// Reads a class file for a host from which CPUs were removed since the file was first read. A class
    /// keeps its remaining CPUs, or uses all CPUs if none remain.
    ///
    /// # Errors
    /// As [`Classes::parse`].
    pub fn parse_without(
        text: &str,
        host: &Topology,
        gone: &BTreeSet<u32>,
    ) -> Result<Classes, ClassError> {
        // The order of classes decides which rule is tried first, and `toml::Table` sorts. The
        // positions of the headers in the text restore the order of the file.
        let file: File = toml::from_str(text)?;
        let mut names: Vec<&String> = file.class.keys().collect();
        names.sort_by_key(|name| header_at(text, name));
        let mut out = Classes::default();
        let mut wrong = Vec::new();
        for name in names {
            let class: ClassFile = match file.class[name].clone().try_into() {
                Ok(class) => class,
                Err(e) => {
                    let e = e.to_string();
                    wrong.push(format!(
                        "[class.{name}]: {}",
                        e.trim_end().replace('\n', " ")
                    ));
                    continue;
                }
            };
            out.add(name, &class, host, gone, &mut wrong);
        }
        if out.classes.len() > CLASSES_MAX {
            wrong.push(format!(
                "{} classes; at most {CLASSES_MAX}",
                out.classes.len()
            ));
        }
        if out.rules.len() > RULES_MAX {
            wrong.push(format!("{} rules; at most {RULES_MAX}", out.rules.len()));
        }
        if wrong.is_empty() {
            Ok(out)
        } else {
            Err(ClassError::Values(wrong))
        }
    }

    fn add(
        &mut self,
        name: &str,
        c: &ClassFile,
        host: &Topology,
        gone: &BTreeSet<u32>,
        wrong: &mut Vec<String>,
    ) {
        let index = self.classes.len();
        if c.comm.is_empty() && c.cgroup.is_empty() {
            wrong.push(format!(
                "[class.{name}]: no `comm` and no `cgroup`, so no thread can match it; add one"
            ));
        }
        for (subject, texts) in [(Subject::Comm, &c.comm), (Subject::Cgroup, &c.cgroup)] {
            for text in texts {
                let is_prefix = text.ends_with('*');
                let plain = text
                    .trim_end_matches('*')
                    .trim_start_matches('/')
                    .to_owned();
                let most = if subject == Subject::Comm {
                    COMM_MAX
                } else {
                    255
                };
                if text.is_empty() || plain.contains('*') {
                    wrong.push(format!(
                        "[class.{name}]: `{text}` must be a name, with at most one * at its end"
                    ));
                } else if plain.len() > most {
                    wrong.push(format!(
                        "[class.{name}]: `{text}` has {} bytes, but the kernel keeps {most}; \
                         write `{}*`",
                        plain.len(),
                        plain.chars().take(most).collect::<String>()
                    ));
                }
                self.rules.push(Rule {
                    subject: subject.clone(),
                    text: plain,
                    is_prefix,
                    class: index,
                });
            }
        }
        if let Some(w) = c.weight
            && !(1..=10_000).contains(&w)
        {
            wrong.push(format!(
                "[class.{name}]: `weight` is {w}; it must be 1 to 10000"
            ));
        }
        if let Some(us) = c.slice_us
            && !(100..=100_000).contains(&us)
        {
            wrong.push(format!(
                "[class.{name}]: `slice_us` is {us}; it must be 100 to 100000"
            ));
        }
        let mut llc_mask = 0;
        if let Some(list) = &c.cpus {
            match parse_cpu_list(list, &format!("[class.{name}]: `cpus`")) {
                Ok(cpus) => llc_mask = mask_of(name, &cpus, host, gone, wrong),
                Err(e) => wrong.push(e.to_string()),
            }
        }
        self.classes.push(Class {
            name: name.to_owned(),
            weight: c.weight,
            slice_us: c.slice_us,
            llc_mask,
            hand_off: c.hand_off,
        });
    }

    /// Index of the class that a cgroup's path selects; the path has no first slash.
    pub fn class_of_cgroup(&self, path: &str) -> Option<usize> {
        let rule = self.rules.iter().find(|r| {
            r.subject == Subject::Cgroup
                && if r.is_prefix {
                    path.starts_with(&r.text)
                } else {
                    path == r.text
                }
        })?;
        Some(rule.class)
    }

    /// The class of a thread, by the BPF program's rules.
    pub fn class_of(&self, comm: &str, cgroup: &str) -> Option<&Class> {
        let cgroup = cgroup.trim_start_matches('/');
        let rule = self.rules.iter().find(|r| {
            let text = if r.subject == Subject::Comm {
                comm
            } else {
                cgroup
            };
            if r.is_prefix {
                text.starts_with(&r.text)
            } else {
                text == r.text
            }
        })?;
        Some(&self.classes[rule.class])
    }
}

fn mask_of(
    name: &str,
    cpus: &[u32],
    host: &Topology,
    gone: &BTreeSet<u32>,
    wrong: &mut Vec<String>,
) -> u64 {
    let is_missing = |c: &&u32| !host.cpus.contains_key(c) && !gone.contains(c);
    let missing: Vec<&u32> = cpus.iter().filter(is_missing).collect();
    if let Some(first) = missing.first() {
        let last = host.cpus.keys().last().copied().unwrap_or(0);
        let more = match missing.len() - 1 {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        wrong.push(format!(
            "[class.{name}]: `cpus` names CPU {first}{more}, which this host lacks or has \
             offline; it has CPUs up to {last}"
        ));
        return 0;
    }
    if cpus.is_empty() {
        wrong.push(format!(
            "[class.{name}]: `cpus` is empty; leave it out for all CPUs"
        ));
    }
    let left = cpus.iter().filter_map(|c| host.cpus.get(c));
    let llcs: BTreeSet<usize> = left.map(|c| c.llc).collect();
    if llcs.iter().any(|&l| l >= 64) {
        wrong.push(format!(
            "[class.{name}]: `cpus` is beyond the 64th LLC, where classes cannot be bound; \
             leave it out"
        ));
        return 0;
    }
    llcs.iter().fold(0, |mask, &l| mask | 1 << l)
}

/// Position of a class's header in the text.
fn header_at(text: &str, name: &str) -> usize {
    [format!("[class.{name}]"), format!("[class.\"{name}\"]")]
        .iter()
        .filter_map(|h| text.find(h))
        .min()
        .unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Cpu;

    fn host() -> Topology {
        let cpus = (0..8).map(|id| {
            (
                id,
                Cpu {
                    id,
                    core: id,
                    llc: id as usize / 4,
                    node: 0,
                },
            )
        });
        Topology {
            cpus: cpus.collect(),
            llcs: vec![(0..4).collect(), (4..8).collect()],
        }
    }

    #[test]
    fn first_matching_class_of_the_file_wins() {
        let text = r#"
            [class.zebra]
            comm = ["EngineCore*", "/launch"]
            weight = 300
            cpus = "5-6"
            hand_off = false
            [class.background]
            cgroup = ["/system.slice/*"]
            comm = ["Engine*"]
            weight = 10
        "#;
        let c = Classes::parse(text, &host()).unwrap();
        let name = |comm, cgroup| c.class_of(comm, cgroup).map(|c| c.name.as_str());
        assert_eq!(name("EngineCore_DP0", "/"), Some("zebra"));
        assert_eq!(name("EngineX", "/"), Some("background"));
        assert_eq!(
            name("sshd", "/system.slice/ssh.service"),
            Some("background")
        );
        assert_eq!(name("sshd", "/user.slice"), None);
        assert_eq!(
            (c.classes[0].llc_mask, c.classes[0].hand_off),
            (0b10, false)
        );
        assert_eq!((c.classes[1].llc_mask, c.classes[1].hand_off), (0, true));
    }

    fn check_refused(body: &str, part: &str) {
        let error = Classes::parse(&format!("[class.a]\n{body}\n"), &host()).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }

    #[test]
    fn mistakes_say_what_is_there_and_what_may_be() {
        check_refused(
            "comm = [\"x\"]\ncpus = \"6-9\"",
            "names CPU 8 and 1 more, which this host lacks",
        );
        check_refused("comm = [\"x\"]\ncpus = \"a\"", "is not a list of CPUs");
        check_refused("comm = [\"x\"]\ncpus = \"\"", "`cpus` is empty");
        check_refused(
            "comm = [\"x\"]\nweight = 0",
            "`weight` is 0; it must be 1 to 10000",
        );
        check_refused("comm = [\"x\"]\nslice_us = 5", "`slice_us` is 5");
        check_refused("weight = 5", "no `comm` and no `cgroup`");
        check_refused("comm = [\"a*b\"]", "at most one * at its end");
        check_refused(
            "comm = [\"0123456789abcdef\"]",
            "but the kernel keeps 15; write `0123456789abcde*`",
        );
        check_refused("comms = [\"x\"]", "unknown field `comms`");
    }

    #[test]
    fn class_goes_on_with_the_cpus_that_remain() {
        let mut host = host();
        for cpu in [4, 5, 6, 7] {
            host.cpus.remove(&cpu);
        }
        host.llcs = vec![(0..4).collect()];
        let mask = |cpus: &str, gone: &[u32]| {
            let text = format!("[class.a]\ncomm = [\"x\"]\ncpus = \"{cpus}\"\n");
            let gone = gone.iter().copied().collect();
            Classes::parse_without(&text, &host, &gone).map(|c| c.classes[0].llc_mask)
        };
        assert_eq!(mask("3-4", &[4, 5, 6, 7]).unwrap(), 0b1);
        assert_eq!(
            mask("4-5", &[4, 5, 6, 7]).unwrap(),
            0,
            "all, rather than none"
        );
        assert!(mask("4-5", &[4]).is_err(), "CPU 5 was never there");
    }

    #[test]
    fn all_mistakes_come_together() {
        let text = "[class.a]\nweight = 0\n[class.b]\ncomm = [\"x\"]\nslice_us = 1\n";
        let error = Classes::parse(text, &host()).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 3, "{error}");
    }
}
