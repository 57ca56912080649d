//! Objectives of requests: for the whole run, and for classes of the workload.

use std::fmt;

use slipstream_base::Slo;
use slipstream_base::slo::Shown;
use slipstream_base::width;
use slipstream_config::workload_file::{Content, Workload};

/// Objectives of a run, and of the classes that have their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// For requests whose class has none: those of a flag.
    pub all: Option<Slo>,
    /// Name and objectives of each class; empty if there is one class without a name.
    pub classes: Vec<(String, Option<Slo>)>,
}

impl From<Slo> for Objectives {
    fn from(slo: Slo) -> Objectives {
        Objectives {
            all: Some(slo),
            classes: Vec::new(),
        }
    }
}

impl Objectives {
    /// `stated`, by a flag, for all requests; without it, the objectives of each class in the workload file.
    pub fn of(workload: &Workload, stated: Option<Slo>) -> Objectives {
        let own = |slo: &Option<Slo>| slo.clone().filter(|_| stated.is_none());
        let classes = match &workload.content {
            Content::Generated(classes) => classes.as_slice(),
            Content::Trace(_) => &[],
        };
        let mut classes: Vec<_> = classes
            .iter()
            .map(|class| (class.name.clone(), own(&class.slo)))
            .collect();
        if matches!(classes[..], [(_, None)]) {
            classes.clear();
        }
        Objectives {
            all: stated,
            classes,
        }
    }

    /// Whether there is any objective.
    pub fn are_stated(&self) -> bool {
        self.all.is_some() || self.classes.iter().any(|class| class.1.is_some())
    }

    /// The objectives of a class.
    pub fn of_class(&self, class: u32) -> Option<&Slo> {
        let own = self.classes.get(class as usize);
        own.and_then(|class| class.1.as_ref()).or(self.all.as_ref())
    }

    /// Whether requests of any class have the objective called `name` (as in `ttft=1s`).
    pub fn any_limits(&self, name: &str) -> bool {
        let classes = 0..width::to_u32(self.classes.len().max(1));
        let mut all = classes.filter_map(|class| self.of_class(class));
        all.any(|slo| slo.limit_ns(name).is_some())
    }

    /// Whether an answered request of `class` met all of its objectives. Without objectives it did.
    pub fn are_met(&self, class: u32, shown: &Shown) -> bool {
        self.of_class(class).is_none_or(|slo| slo.is_met(shown))
    }

    /// Whether an objective concerns the longest gap between two tokens of a request.
    pub fn read_longest_gap(&self) -> bool {
        let own = self.classes.iter().filter_map(|class| class.1.as_ref());
        own.chain(&self.all).any(Slo::reads_longest_gap)
    }
}

/// `ttft=1s`, or `chat: ttft=1s; ttft=5s` if classes have their own.
impl fmt::Display for Objectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for (name, slo) in &self.classes {
            if let Some(slo) = slo {
                write!(f, "{between}{name}: {slo}")?;
                between = "; ";
            }
        }
        match &self.all {
            Some(slo) => write!(f, "{between}{slo}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use slipstream_config::workload_file::Class;

    use super::*;

    fn slo(text: &str) -> Slo {
        text.parse().expect("an objective")
    }

    fn workload(own: &[Option<&str>]) -> Workload {
        let classes = own.iter().enumerate().map(|(at, own)| Class {
            name: format!("c{at}"),
            slo: own.map(slo),
            ..Class::default()
        });
        Workload {
            content: Content::Generated(classes.collect()),
            ..Workload::default()
        }
    }

    #[test]
    fn a_stated_objective_replaces_those_of_the_file_in_every_class() {
        let stated = Some(slo("ttft=1ms"));
        for own in [
            &[None][..],
            &[Some("ttft=1s,itl=50ms")],
            &[Some("ttft=1s"), None],
            &[Some("ttft=1s"), Some("e2e=2s")],
            &[None, None],
        ] {
            let workload = workload(own);
            let objectives = Objectives::of(&workload, stated.clone());
            let by_file = Objectives::of(&workload, None);
            for (class, own) in (0..).zip(own) {
                assert_eq!(objectives.of_class(class), stated.as_ref(), "{own:?}");
                assert_eq!(by_file.of_class(class), own.map(slo).as_ref());
            }
            assert_eq!(objectives.to_string(), "ttft=1ms");
            // The report has rows of classes whoever states the objective.
            let named = if own.len() > 1 { own.len() } else { 0 };
            assert_eq!(objectives.classes.len(), named);
        }
    }
}
