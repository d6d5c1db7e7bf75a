//! Allocation patterns that other projects published, as programs that every allocator can play.
//!
//! Sizes, counts and probabilities are theirs; the source of each is named. Threads of their
//! programs are streams here, in turns that the pattern fixes, so that each allocator gets the same
//! requests.

use aquifer_trace::input::Program;

mod fragmentation;
mod rmm;
mod threads;

/// A pattern.
#[derive(Debug, Clone)]
pub(crate) struct Pattern {
    /// Its name, with parameters as in its source.
    pub(crate) name: String,
    /// The project that published it.
    pub(crate) source: &'static str,
    write: Write,
}

#[derive(Debug, Clone, Copy)]
enum Write {
    Fixed(fn() -> Program),
    Random { allocations: u32, max_mib: u64 },
}

impl Pattern {
    fn fixed(name: &str, source: &'static str, write: fn() -> Program) -> Pattern {
        Pattern { name: name.to_owned(), source, write: Write::Fixed(write) }
    }

    /// The program.
    pub(crate) fn program(&self) -> Program {
        let program = match self.write {
            Write::Fixed(write) => write(),
            Write::Random { allocations, max_mib } => rmm::random_allocations(allocations, max_mib),
        };
        let headers = [("name", &*self.name), ("source", self.source)];
        let headers = headers.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        Program { name: self.name.clone(), headers, ..program }
    }
}

/// All patterns, in the order of the documentation.
pub(crate) fn all() -> Vec<Pattern> {
    let random = rmm::COUNTS.into_iter().flat_map(|allocations| {
        rmm::MAX_MIB.map(|max_mib| Pattern {
            name: format!("random_allocations/{allocations}/{max_mib}"),
            source: "RMM",
            write: Write::Random { allocations, max_mib },
        })
    });
    let others = [
        Pattern::fixed("ascending", "PyTorch devlog", fragmentation::ascending),
        Pattern::fixed("comb", "PyTorch devlog", fragmentation::comb),
        Pattern::fixed("loophole_1mib", "PyTorch devlog", fragmentation::loophole),
        Pattern::fixed("stays_behind", "PyTorch 193400", fragmentation::stays_behind),
        Pattern::fixed("comb_1gib", "TorchRec 4584", fragmentation::comb_1gib),
        Pattern::fixed("stride_1.75mib", "kvcached", fragmentation::stride_contiguous),
        Pattern::fixed("stride_64kib", "kvcached", fragmentation::stride_of_layers),
        Pattern::fixed("grow_by_little", "llama.cpp 22107", fragmentation::grow_by_little),
        Pattern::fixed("larson", "mimalloc-bench", threads::larson),
        Pattern::fixed("xmalloc-test", "mimalloc-bench", threads::xmalloc_test),
        Pattern::fixed("mstress", "mimalloc-bench", threads::mstress),
    ];
    random.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use aquifer_trace::input::Event;

    #[test]
    fn programs_are_sound_and_repeatable() {
        let patterns = all();
        let names: HashSet<&str> = patterns.iter().map(|pattern| &*pattern.name).collect();
        assert_eq!(names.len(), patterns.len());
        for pattern in patterns.iter().filter(|pattern| !pattern.name.starts_with("random_allocations/100000")) {
            let program = pattern.program();
            assert_eq!((&program, &program.name), (&pattern.program(), &pattern.name));
            let mut live = vec![None; program.slots as usize];
            let (mut sum, mut peak) = (0, 0);
            for event in &program.events {
                match *event {
                    Event::Alloc { slot, bytes, stream } => {
                        assert!(bytes > 0 && usize::from(stream) < program.streams.len(), "{}", pattern.name);
                        assert_eq!(live[slot as usize].replace(bytes), None, "{}", pattern.name);
                        sum += bytes;
                        peak = peak.max(sum);
                    }
                    Event::Free { slot } => sum -= live[slot as usize].take().unwrap(),
                    Event::RecordStream { slot, .. } => assert!(live[slot as usize].is_some(), "{}", pattern.name),
                    Event::Iteration(_) => {}
                }
            }
            assert_eq!(peak, program.peak_requested_bytes, "{}", pattern.name);
            assert!(peak < 200 << 30, "{}", pattern.name);
        }
    }
}
