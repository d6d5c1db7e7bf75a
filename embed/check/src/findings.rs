//! What was found: pairs of calls that do not go together, each pair once, with a count.
//!
//! Under the judge's lock, calls are known by their return addresses alone. Names are looked up by
//! [`Finding::row`], without that lock: it takes the loader's, which another thread may hold while a
//! constructor of the library that it loads calls CUDA.

use std::collections::HashMap;
use std::ops::Range;

use aquifer_oracle::Op;
use serde_json::{Value, json};

use crate::advice::{self, stream_name};
use crate::stack::{self, Stack, Stacks};

/// Two calls that do not go together.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    number: usize,
    is_certain: bool,
    kind: &'static str,
    range: Range<u64>,
    /// The call that frees what is live there.
    right_free: &'static str,
    /// Each with its stack and, for a node of a graph, that of the launch.
    calls: [(Op, Stack, Option<Stack>); 2],
    /// How often they met; 0 once it turned out that the second one was refused.
    count: u64,
}

impl Finding {
    /// The line that is written about it. Looks names up: call it without a lock.
    pub(crate) fn row(&self) -> Value {
        let [first, second] = &self.calls;
        let of = |(op, stack, launched): &(Op, Stack, Option<Stack>)| {
            let launched = launched.map(|stack| stack::frames(stack, "cuGraphLaunch"));
            let stack = stack::frames(*stack, op.call);
            json!({"call": op.call, "stream": op.stream.map(stream_name), "stack": stack, "launched": launched})
        };
        json!({
            "number": self.number, "process": std::process::id(), "program": program(), "certain": self.is_certain,
            "kind": self.kind, "what": advice::what(self.kind, &first.0, &second.0),
            "advice": advice::advice(self.kind, &first.0, &second.0, self.right_free),
            "address": self.range.start, "bytes": self.range.end - self.range.start,
            "first": of(first), "second": of(second), "count": self.count,
        })
    }
}

/// A kind of finding, the two calls, and their stacks.
type Key = (&'static str, &'static str, u64, &'static str, u64);

#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) stacks: Stacks,
    met: HashMap<Key, Finding>,
    /// Those that were not written yet.
    new: Vec<Finding>,
    /// How many meetings were not noted, because there were too many findings.
    pub(crate) left_out: u64,
}

impl Findings {
    /// How many different findings are written.
    const MAX: usize = 1000;

    pub(crate) fn add(
        &mut self,
        (is_certain, kind): (bool, &'static str),
        calls: [Op; 2],
        range: Range<u64>,
        right_free: &'static str,
    ) {
        let [first, second] = calls.map(|op| (op.call, op.place % Stacks::END));
        let key = (kind, first.0, first.1, second.0, second.1);
        if let Some(known) = self.met.get_mut(&key) {
            known.count += 1;
            return;
        }
        if self.met.len() >= Findings::MAX {
            self.left_out += 1;
            return;
        }
        let stack = |place: u64| self.stacks.get(place % Stacks::END);
        let calls = calls.map(|op| (op, stack(op.place), op.launch.map(stack)));
        let number = self.met.len() + 1;
        let finding = Finding { number, is_certain, kind, range, right_free, calls, count: 1 };
        self.met.insert(key, finding.clone());
        self.new.push(finding);
    }

    /// Takes those that were not written yet.
    pub(crate) fn take_new(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.new)
    }

    /// The driver refused the call at a place: it met no other.
    pub(crate) fn retract(&mut self, place: u64) {
        let refused = self.met.values_mut().filter(|found| found.calls[1].0.place == place && found.count == 1);
        for finding in refused {
            finding.count = 0;
            self.new.push(finding.clone());
        }
    }

    /// Those that met again.
    pub(crate) fn repeated(&self) -> Vec<Finding> {
        let mut repeated: Vec<Finding> = self.met.values().filter(|finding| finding.count > 1).cloned().collect();
        repeated.sort_unstable_by_key(|finding| finding.number);
        repeated
    }

    /// The kinds, and the two calls.
    #[cfg(test)]
    pub(crate) fn all(&self) -> Vec<[&'static str; 3]> {
        let there = self.met.values().filter(|finding| finding.count > 0);
        there.map(|finding| [finding.kind, finding.calls[0].0.call, finding.calls[1].0.call]).collect()
    }
}

pub(crate) fn program() -> String {
    std::env::current_exe().unwrap_or_default().file_name().unwrap_or_default().to_string_lossy().into_owned()
}
