//! What requests are to meet: objectives of the whole run, and of classes of the workload.

use std::fmt;

use slipstream_base::Slo;
use slipstream_base::slo::Shown;
use slipstream_config::workload_file::{Content, Workload};

/// Objectives of a run. A class's own come before those of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objectives {
    /// Of requests whose class has none.
    pub all: Option<Slo>,
    /// Name of each class and its own; empty if there is one class without a name.
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
    /// Those of `workload`, and `all` for the rest.
    pub fn of(workload: &Workload, all: Option<Slo>) -> Objectives {
        let classes = match &workload.content {
            Content::Generated(classes) if classes.len() > 1 || classes[0].slo.is_some() => classes
                .iter()
                .map(|class| (class.name.clone(), class.slo.clone()))
                .collect(),
            _ => Vec::new(),
        };
        Objectives { all, classes }
    }

    /// Whether there is any.
    pub fn are_stated(&self) -> bool {
        self.all.is_some() || self.classes.iter().any(|class| class.1.is_some())
    }

    /// Those of a class.
    pub fn of_class(&self, class: u32) -> Option<&Slo> {
        let own = self.classes.get(class as usize);
        own.and_then(|class| class.1.as_ref()).or(self.all.as_ref())
    }

    /// Whether a request of `class` that was answered met all of its own. One without any did.
    pub fn are_met(&self, class: u32, shown: &Shown) -> bool {
        self.of_class(class).is_none_or(|slo| slo.is_met(shown))
    }

    /// Whether one is on the longest gap between two tokens of a request.
    pub fn read_longest_gap(&self) -> bool {
        let own = self.classes.iter().filter_map(|class| class.1.as_ref());
        own.chain(&self.all).any(Slo::reads_longest_gap)
    }
}

/// `ttft=1s`, or `chat: ttft=1s; ttft=5s` where classes have their own.
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
