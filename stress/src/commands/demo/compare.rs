//! The comparison at the end of the demonstration.

use super::play::{PYTORCH, SEGMENTS};
use aquifer_trace::input::Program;
use aquifer_trace::profile::Profile;

use crate::cli::ConfigArg;
use crate::commands::fit::{with_splitting, without_same};
use crate::commands::study::rows::Allocator;
use crate::commands::study::{Manager, plenty, try_all};
use crate::commands::{options, ratio};
use crate::exit::{Failure, Outcome};
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{Table, factor};
use crate::text::Bytes;

/// PyTorch's allocator with expandable segments.
const EXPANDABLE: &str = "backing:expandable";

/// The options that are compared besides the user's.
const POLICIES: [&str; 7] = [
    "",
    SEGMENTS,
    PYTORCH,
    EXPANDABLE,
    "backing:pytorch,roundup_power2_divisions:8",
    "backing:pytorch,max_split_size_mb:128",
    "no_cache:True",
];

row! {
    /// JSON keys of the step compare, per program and config
    pub(super) struct Compared {
        #[serde(flatten)]
        allocator: Allocator,
        /// "compare"
        step: &'static str,
        /// the program
        trace: String,
        /// the most memory that the program had requested and not yet freed
        peak_requested_bytes: u64,
        /// ratio of smallest_device_bytes to that
        smallest_over_requested: Option<f64> => ["smallest device, ratio", factor],
        #[serde(skip)]
        config: ConfigArg,
    }
}

impl Compared {
    /// Its effect on the exit code.
    pub(super) fn outcome(&self) -> Outcome {
        let lacks = self.allocator.ooms > 0 || self.allocator.smallest_device_bytes.is_none();
        if lacks { Outcome::OutOfMemory } else { Outcome::Done }
    }
}

pub(super) fn compare(session: &Session, programs: &[Program]) -> Result<Vec<Compared>, Failure> {
    let maps = session.sim().is_none_or(|sim| sim.vmm);
    let mut policies = with_splitting(&session.configs_with(&POLICIES));
    policies.retain(|policy| maps || !policy.pytorch.as_ref().is_some_and(|options| options.expandable_segments));
    let managers: Vec<Manager> = policies.iter().map(manager).collect();
    let mut compared = Vec::new();
    for program in programs {
        let (profile, roomy) = (Profile::of(program), session.resized(plenty(program)));
        for tried in try_all(session, &roomy, program, &profile, managers.clone(), Some(0)) {
            let case = tried.map_err(|(_, failure)| failure)?;
            let (config, requested) = (case.manager.config.clone(), program.peak_requested_bytes);
            // The same options without splitting fit nowhere, either, which is reported.
            if case.smallest_device.is_none() && !config.is_trial {
                let (name, options) = (&program.name, options(&config.text));
                session.message(format_args!("out of memory: {name} with {options}: it does not finish on any device"));
            }
            compared.push(Compared {
                allocator: case.row(requested),
                step: "compare",
                trace: program.name.clone(),
                peak_requested_bytes: requested,
                smallest_over_requested: case.smallest_device.and_then(|bytes| ratio(bytes, requested)),
                config,
            });
        }
    }
    without_same(
        &mut compared,
        &policies,
        |row| &row.config.text,
        |row| (row.trace.clone(), row.allocator.smallest_device_bytes, row.allocator.ooms == 0),
    );
    Ok(compared)
}

/// The allocator that these options choose.
fn manager(config: &ConfigArg) -> Manager {
    let Some(options) = &config.pytorch else { return Manager::asked(config.clone()) };
    let (backing, name) =
        if options.expandable_segments { (EXPANDABLE, "PyTorch, expandable segments") } else { (PYTORCH, "PyTorch") };
    let name = match config.text.strip_prefix(backing).map(|rest| rest.trim_start_matches(',')) {
        Some("") => name.to_owned(),
        others => format!("{name} with {}", others.unwrap_or(&config.text)),
    };
    Manager { name, is_pytorch: true, ..Manager::asked(config.clone()) }
}

/// The rows of each recording under its name.
pub(super) fn tabulate(compared: &[Compared]) -> Table {
    let title = |row: &Compared| format!("{} uses at most {}:", row.trace, Bytes(row.peak_requested_bytes));
    Compared::table(compared).grouped(compared.iter().map(title))
}

/// A summary of the rows of a recording.
pub(super) fn findings(trace: &str, compared: &[Compared]) -> Option<String> {
    let rows = || compared.iter().filter(|row| row.trace == trace && row.allocator.ooms == 0);
    let usual = &rows().find(|row| row.config.text.is_empty())?.allocator;
    let pytorch = rows().filter(|row| row.config.pytorch.is_some()).map(|row| &row.allocator);
    let (best, device) = pytorch.filter_map(|row| Some((row, row.smallest_device_bytes?))).min_by_key(|row| row.1)?;
    let mut text = format!(
        "{trace} finishes on {} with Aquifer. The best of PyTorch's rows is {}: {}, and where there is plenty, it \
         holds {} instead of {}.",
        Bytes(usual.smallest_device_bytes?),
        best.name,
        Bytes(device),
        Bytes(best.peak_reserved_bytes),
        Bytes(usual.peak_reserved_bytes)
    );
    if let Some(none) = rows().find(|row| row.config.config.no_cache) {
        text += &format!(
            " Without a cache it holds what it uses, at the price of {} driver calls instead of {}, and of waiting for \
             the device each time that some goes back.",
            none.allocator.driver_calls?, usual.driver_calls?
        );
    }
    Some(text)
}
