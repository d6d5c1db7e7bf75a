//! `run --check`: the program keeps its memory, and a library before the driver finds what is wrong
//! in its calls.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use aquifer_trace::input::{InputError, Location, Reason};
use serde::Deserialize;
use serde_json::Value;

use super::process::{before_driver, code, ended, failed};
use crate::cli::RunArgs;
use crate::exit::{Failure, Outcome};
use crate::row::row;
use crate::session::Session;

const LIBRARY: &str = "libaquifer_check.so";
const BUILD: &str = "`cargo build --release -p aquifer-check` builds it";

row! {
    /// With --check and --json: two calls of a program that do not go together
    #[derive(Deserialize)]
    pub(crate) struct Found {
        /// the number of the finding in its process
        number: u64,
        /// the process that made the calls
        process: u32,
        /// its program
        program: String,
        /// whether the calls are certain to be wrong; otherwise a kernel takes part, of which only
        /// the parameters are known
        certain: bool,
        /// unordered-work, freed-in-use, use-after-free, stale-graph, freed-twice or wrong-free
        kind: String,
        /// how many times the two calls met; at least once where the process did not end by exit
        count: u64,
        /// the finding in words
        what: String,
        /// the missing edge, and how to add it
        advice: String,
        /// the first address where the calls meet
        address: u64,
        /// the length from there
        bytes: u64,
        /// the earlier call: its name, stream and stack, and for a node of a graph where that was
        /// launched
        first: Place,
        /// the later call
        second: Place,
    }
}

/// A call, where it was made, and where the graph was launched that it is a node of.
#[derive(Clone, Debug, serde::Serialize, Deserialize)]
pub(crate) struct Place {
    call: String,
    stream: Option<String>,
    stack: Vec<String>,
    launched: Option<Vec<String>>,
}

/// What a process says when it ends.
#[derive(Debug, Deserialize)]
struct Summary {
    process: u32,
    program: String,
    calls: u64,
    left_out: u64,
    kernels: u64,
    kernels_unread: u64,
}

pub(super) fn run(session: &Session, args: &RunArgs) -> Result<Outcome, Failure> {
    let suppressed = match &args.suppress {
        Some(path) => {
            let unread = |cause| InputError { path: path.clone(), location: Location::File, reason: Reason::Io(cause) };
            patterns(&fs::read_to_string(path).map_err(unread)?)
        }
        None => Vec::new(),
    };
    let (folder, mut command) = before_driver(args, LIBRARY, BUILD)?;
    let program = PathBuf::from(command.get_program());
    let file = folder.0.join("findings");
    command.env("AQUIFER_CHECK", &file);
    let status = ended(command).map_err(|cause| failed(&program, cause))?;
    let (mut found, summaries) = read(&fs::read_to_string(&file).unwrap_or_default());
    let all = found.len();
    found.retain(|found| !suppressed.iter().any(|pattern| found.matches(pattern)));
    found.iter().try_for_each(|found| session.row(found))?;
    session.message(report(&found, &summaries, all - found.len(), session.json()).trim_end());
    Ok(if found.iter().any(|found| found.certain) { Outcome::Violations } else { Outcome::Program(code(status)) })
}

fn patterns(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// The findings, each as it was written last, and the summaries. A process that is killed may leave
/// a line half written.
fn read(text: &str) -> (Vec<Found>, Vec<Summary>) {
    let (mut found, mut summaries): (Vec<Found>, _) = (Vec::new(), Vec::new());
    for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if let Ok(new) = serde_json::from_value::<Found>(line.clone()) {
            match found.iter_mut().find(|old| (old.process, old.number) == (new.process, new.number)) {
                Some(old) => *old = new,
                None => found.push(new),
            }
        } else if let Ok(summary) = serde_json::from_value(line) {
            summaries.push(summary);
        }
    }
    // What met a call that was then refused.
    found.retain(|found| found.count > 0);
    (found, summaries)
}

impl Found {
    /// Whether the text is in the kind, or in a frame.
    fn matches(&self, pattern: &str) -> bool {
        let stacks =
            [&self.first, &self.second].into_iter().flat_map(|place| [Some(&place.stack), place.launched.as_ref()]);
        self.kind.contains(pattern) || stacks.flatten().flatten().any(|frame| frame.contains(pattern))
    }
}

fn report(found: &[Found], summaries: &[Summary], suppressed: usize, is_json: bool) -> String {
    let mut text = String::from(
        "Aquifer checked calls of the CUDA driver. What kernels access is not among them: only addresses among their \
         parameters are known, not those within their structures.\n",
    );
    for Summary { process, program, calls, left_out, kernels, kernels_unread } in summaries {
        let _ = writeln!(text, "{program} (process {process}): calls {calls}, kernels {kernels}");
        if *kernels_unread > 0 {
            let _ = writeln!(text, "  kernels whose parameters could not be read: {kernels_unread}");
        }
        if *left_out > 0 {
            let _ = writeln!(text, "  meetings of calls beyond the first 1000 findings: {left_out}");
        }
    }
    if summaries.is_empty() {
        text.push_str("No process made such calls and ended by `exit`: counts are missing.\n");
    }
    let certain = found.iter().filter(|found| found.certain).count();
    let _ = write!(text, "Certain findings: {certain}; possible ones: {}", found.len() - certain);
    let _ = writeln!(text, "; suppressed: {suppressed}");
    for found in found.iter().filter(|_| !is_json) {
        let Found { certain, kind, count, what, advice, address, bytes, first, second, .. } = found;
        let level = if *certain { "certain" } else { "possible" };
        let _ = writeln!(
            text,
            "\n{level}: {kind}, {count} {}, process {}\n  {what}\n  at {address:#x}, {bytes} bytes\n  to mend it: {advice}",
            if *count == 1 { "time" } else { "times" },
            found.process,
        );
        for (title, place) in [("first", first), ("second", second)] {
            stack(&mut text, &format!("{title}: {}", place.call), &place.stack);
            if let Some(launched) = &place.launched {
                stack(&mut text, "in a graph launched", launched);
            }
        }
    }
    text
}

fn stack(text: &mut String, title: &str, frames: &[String]) {
    let _ = writeln!(text, "  {title}");
    for frame in frames {
        let _ = writeln!(text, "    at {frame}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(number: u64, count: u64) -> String {
        let place =
            r#"{"call": "cuMemFree_v2", "stream": null, "stack": ["pool::give (pool.rs:7)"], "launched": null}"#;
        format!(
            r#"{{"number": {number}, "process": 7, "program": "p", "certain": true, "kind": "freed-twice",
                "count": {count}, "what": "w", "advice": "a", "address": 4096, "bytes": 1,
                "first": {place}, "second": {place}}}"#
        )
        .replace('\n', "")
    }

    #[test]
    fn findings_are_read_as_they_were_written_last() {
        let text = [line(1, 1), line(2, 1), line(1, 5), "{\"numb".to_owned()].join("\n");
        let (found, summaries) = read(&text);
        assert_eq!(found.iter().map(|found| (found.number, found.count)).collect::<Vec<_>>(), [(1, 5), (2, 1)]);
        assert!(summaries.is_empty());
        let said = report(&found, &summaries, 0, false);
        assert!(said.contains("certain: freed-twice, 5 times, process 7") && said.contains("at pool::give"), "{said}");
    }

    #[test]
    fn a_pattern_is_part_of_the_kind_or_of_a_frame() {
        let (found, _) = read(&line(1, 1));
        let matching = patterns("# a comment\n\n freed-tw \npool.rs:7\npool::take\ncuMemFree");
        assert_eq!(matching.iter().filter(|pattern| found[0].matches(pattern)).count(), 2, "{matching:?}");
    }
}
