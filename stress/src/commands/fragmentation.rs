//! `fragmentation`: programs that fragment memory, under several policies side by side.

use aquifer::memory::AllocError;
use aquifer::{Allocator, Device, Stream};
use aquifer_trace::input::Program;
use aquifer_trace::{Aquifer, Map, OnOom, Player, Refused, Subject};

use crate::cli::{ConfigArg, FragmentationArgs};
use crate::commands::{list, options, violations};
use crate::exit::{Failure, Outcome};
use crate::map::Style;
use crate::opened::Opened;
use crate::room::Room;
use crate::row::{Row, row};
use crate::scenarios::{self, Scenario};
use crate::session::Session;
use crate::stage::Stage;
use crate::table::bytes;
use crate::text::{Bytes, wrap};

/// Memory that does not move.
const SEGMENTS: &str = "backing:segments";

/// Policies for every scenario.
const POLICIES: [&str; 3] = [SEGMENTS, "no_cache:True", ""];

/// Policies for scenarios with several streams.
const STREAM_POLICIES: [&str; 5] =
    ["backing:segments,cross_stream:off", SEGMENTS, "backing:segments,cross_stream:wait", "no_cache:True", ""];

/// Runs the command.
///
/// # Errors
/// When there is no such scenario, the device cannot be opened, the allocator fails, or standard
/// output cannot be written.
pub fn run(session: &Session, args: &FragmentationArgs) -> Result<Outcome, Failure> {
    if args.list {
        let all = scenarios::ALL.map(|Scenario { name, summary, .. }| (name, summary));
        return list(session, 12, "scenario", all);
    }
    let style = Style::of_stdout(args.ascii);
    let mut outcome = Outcome::Done;
    let chosen = if args.scenarios.is_empty() { &scenarios::ALL[..] } else { &args.scenarios };
    for scenario in chosen {
        let policies = policies(session, scenario);
        let bar = session.progress(policies.len() as u64, scenario.name);
        let (mut rows, mut maps) = (Vec::new(), Vec::new());
        for policy in &policies {
            let tried = experiment(session, scenario, policy);
            bar.inc(1);
            let (row, map) = match tried {
                Ok(found) => found,
                Err(failure @ Failure::Open(_)) => return Err(failure),
                Err(failure) => {
                    outcome = outcome.max(failure.outcome());
                    session.message(format_args!(
                        "error: {} under {}: {failure}",
                        scenario.name,
                        options(&policy.text)
                    ));
                    continue;
                }
            };
            if row.violations > 0 {
                outcome = Outcome::Violations;
            }
            session.row(&row)?;
            if args.maps || row.config == SEGMENTS {
                maps.push(format!("In the end, under {}:\n{}\n", options(&row.config), style.draw(&map)));
            }
            rows.push(row);
        }
        bar.finish_and_clear();
        let Some(row) = rows.last() else { continue };
        let text = format!(
            "{}: {}. It uses up to {} at once, and its last request is for {}.",
            scenario.name,
            scenario.summary,
            Bytes(row.peak_requested_bytes),
            Bytes(row.request_bytes)
        );
        let table = Fragmented::table(&rows);
        session.show(format_args!("{}\n\n{table}\n\n{}", wrap(&text, style.width), maps.join("\n")))?;
    }
    Ok(outcome)
}

row! {
    /// Each scenario is a synthetic program, sized by the device, followed by one more request: the
    /// probe. The probe is no larger than the free memory, so if it is refused, the cause is
    /// fragmentation, or a limit or headroom among the options. Each --config adds a row. With --list, a
    /// row has the name of a scenario, and its summary.
    ///
    /// JSON keys, per scenario and config
    pub(crate) struct Fragmented {
        /// the scenario
        scenario: &'static str,
        /// the options
        config: String => ["options", |row| options(&row.config)],
        /// the device
        device: String,
        /// the outcome in words
        verdict: String => ["last request"],
        /// the most memory that the program had requested and not yet freed
        peak_requested_bytes: u64,
        /// the most memory that was allocated, after rounding
        peak_allocated_bytes: u64,
        /// the most memory that was held from the device
        peak_reserved_bytes: u64 => ["holds", bytes],
        /// driver calls that the program caused
        driver_calls: u64 => ["driver calls"],
        /// the share of free_bytes that the probe cannot use, 0 to 1; 1 if the probe is refused
        unusable_index: f64 => ["unusable", |row| format!("{:.1} %", row.unusable_index * 100.0)],
        /// free memory at the end of the program: in the cache, and on the device within limit and
        /// headroom
        free_bytes: u64 => ["free", bytes],
        /// the largest request that is served then, found by trying, each time after flushing the cache
        largest_free_bytes: u64 => ["largest free piece", bytes],
        /// memory that is allocated then
        allocated_bytes: u64 => ["live in the end", bytes],
        /// memory that is held from the device then
        reserved_bytes: u64,
        /// size of the probe
        request_bytes: u64,
        /// whether the probe was served
        probe_fits: bool,
        /// requests of the program that were refused
        ooms: u64,
        /// times that all cached memory was released to try again
        retries: u64,
        /// times that a stream reused memory that another one had freed
        cross_stream_reuses: u64,
        /// pieces of work that the simulated device found unordered; 0 unless there is a bug
        violations: u64,
    }
}

/// The policies of a scenario: the built-in ones, then the user's.
fn policies(session: &Session, scenario: &Scenario) -> Vec<ConfigArg> {
    session.configs_with(if scenario.streams { &STREAM_POLICIES[..] } else { &POLICIES })
}

/// Plays a scenario under a policy, examines the free memory, and makes the request.
fn experiment(session: &Session, scenario: &Scenario, policy: &ConfigArg) -> Result<(Fragmented, Map), Failure> {
    let device: Device = session.open()?;
    let setup = scenario.setup(device.memory_info()?.free, session.seed());
    let mut stage = Stage::new(session, &device, policy, setup.program.streams.len())?;
    let mut player = Player::new(&setup.program);
    let ooms = player.play(&mut stage, OnOom::Skip)?;

    let stats = stage.allocator.stats();
    let stream = stage.streams[usize::from(setup.probe_stream)].clone();
    let room = Room::of(&stage.allocator, &stream)?;
    let map = Map::of(&stage.allocator, &stage.streams)?;
    // Whether it fits, and else the memory that it would have taken from the device.
    let (probe_fits, growth) = match stage.alloc(setup.probe, setup.probe_stream) {
        Ok(probe) => {
            stage.free(probe);
            (true, 0)
        }
        Err(Refused::OutOfMemory(report)) => (false, report.map_or(0, |report| report.growth)),
        Err(Refused::Failed(error)) => return Err((*error).into()),
    };
    let after = stage.allocator.stats();
    let largest = room.largest_served(setup.probe, probe_fits, |bytes| serves(&stage.allocator, bytes, &stream))?;
    let mut row = Fragmented {
        scenario: scenario.name,
        config: policy.text.clone(),
        device: session.device_text().to_owned(),
        peak_requested_bytes: setup.program.peak_requested_bytes,
        peak_allocated_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        allocated_bytes: stats.allocated_bytes.all.current,
        reserved_bytes: stats.reserved_bytes.all.current,
        free_bytes: room.free(),
        largest_free_bytes: largest,
        unusable_index: (room.unusable(setup.probe, largest) * 1e4).round() / 1e4,
        request_bytes: setup.probe,
        probe_fits,
        ooms,
        retries: after.num_alloc_retries,
        driver_calls: driver_calls(session, &setup.program, policy)?,
        cross_stream_reuses: after.cross_stream_reuses,
        violations: violations(session, scenario.name, &device),
        verdict: String::new(),
    };
    row.verdict = verdict(&row, &room, growth);
    Ok((row, map))
}

/// The driver calls of the allocator alone: without those for the contents of blocks.
fn driver_calls(session: &Session, program: &Program, policy: &ConfigArg) -> Result<u64, Failure> {
    let mut observed = Aquifer::observed(session, policy, program.streams.len(), 0)?;
    let mut player = Player::new(program);
    let (_, costs) = observed.pass(|observed| player.play(observed, OnOom::Skip))?;
    Ok(costs.calls.total())
}

/// Whether a request is served.
fn serves(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<bool, Failure> {
    match allocator.alloc_bytes(bytes, stream) {
        Ok(_) => Ok(true),
        Err(AllocError::OutOfMemory(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The result in words; `growth` is the memory that the request would have taken from the device.
fn verdict(row: &Fragmented, room: &Room, growth: u64) -> String {
    let (free, largest, foreign) = (Bytes(row.free_bytes), Bytes(row.largest_free_bytes), Bytes(room.foreign));
    let probe = match () {
        () if row.probe_fits => "fits".to_owned(),
        () if row.free_bytes < row.request_bytes => format!("full: {free} free{}", beside(room)),
        () if row.free_bytes - room.foreign < row.request_bytes => {
            format!("stuck: {free} free, {foreign} of it with other streams")
        }
        () if growth > room.whole() && room.whole() >= row.request_bytes => {
            let (whole, growth) = (Bytes(room.whole()), Bytes(growth));
            format!("too small: {whole} left on the device{}, and such a request takes {growth} of it", beside(room))
        }
        () => format!("fragmented: {free} free, largest piece {largest}"),
    };
    match (row.ooms, row.retries) {
        (0, 0) => probe,
        (0, _) if !row.probe_fits => probe,
        (0, 1) => format!("{probe}, after flushing the cache once"),
        (0, retries) => format!("{probe}, after flushing the cache {retries} times"),
        (1, _) => format!("1 request refused before; {probe}"),
        (ooms, _) => format!("{ooms} requests refused before; {probe}"),
    }
}

/// Other free memory on the device, and why it is not available.
fn beside(room: &Room) -> String {
    match (room.headroom, room.over_limit) {
        (0, 0) => String::new(),
        (headroom, 0) => format!(", beside the headroom of {}", Bytes(headroom)),
        (0, over) => format!(", beside {} over the limit", Bytes(over)),
        (headroom, over) => format!(", beside {} over the limit and the headroom of {}", Bytes(over), Bytes(headroom)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;

    fn rows(device: &str, configs: &[&str]) -> Vec<Fragmented> {
        let configs = configs.iter().map(|text| text.parse().unwrap()).collect();
        let global = Global { device: Some(device.parse().unwrap()), configs, ..Global::default() };
        let session = Session::new(&global).unwrap();
        let experiments = scenarios::ALL.iter().flat_map(|scenario| {
            policies(&session, scenario).into_iter().map(|policy| experiment(&session, scenario, &policy).unwrap().0)
        });
        experiments.collect()
    }

    #[test]
    fn figures_agree_with_the_result_of_the_last_request() {
        let configs = [
            "headroom_mb:300",
            "backing:segments,headroom_mb:300",
            "limit_mb:600",
            "backing:segments,limit_mb:600",
            "cross_stream:off",
        ];
        for device in ["sim:1MiB", "sim:3MiB", "sim:50MiB", "sim:1GiB", "sim:1000000007"] {
            for row in rows(device, &configs) {
                let Fragmented { free_bytes, largest_free_bytes, unusable_index, request_bytes, probe_fits, .. } = row;
                assert_eq!(largest_free_bytes >= request_bytes, probe_fits, "{row:?}");
                assert_eq!(unusable_index < 1.0, probe_fits, "{row:?}");
                assert!(largest_free_bytes <= free_bytes, "{row:?}");
                let says = |part| row.verdict.contains(part);
                assert_eq!(says("full"), !probe_fits && free_bytes < request_bytes, "{row:?}");
                // Then only fragmentation can be the reason of a refusal.
                let roomy = device == "sim:1GiB" && !row.config.contains("headroom") && !row.config.contains("limit");
                assert!(!roomy || probe_fits || says("fragmented") || says("stuck"), "{row:?}");
            }
        }
    }

    #[test]
    fn the_verdict_names_the_headroom_and_the_limit() {
        let of = |rows: Vec<Fragmented>, scenario: &str, policy: &str| {
            let row = rows.into_iter().find(|row| row.scenario == scenario && row.config == policy);
            row.unwrap().verdict
        };
        for policy in ["backing:segments,headroom_mb:300", "headroom_mb:300"] {
            let verdict = of(rows("sim:1GiB", &[policy]), "sequences", policy);
            assert!(verdict.contains("full: ") && verdict.contains("beside the headroom of 300.00 MiB"), "{verdict}");
        }
        let verdict = of(rows("sim:1GiB", &["limit_mb:600"]), "sequences", "limit_mb:600");
        assert!(verdict.contains("full: ") && verdict.contains(" over the limit"), "{verdict}");
        let verdict = of(rows("sim:1MiB", &[]), "kv_cache", SEGMENTS);
        assert!(verdict.contains("too small: 1.00 MiB left on the device"), "{verdict}");
    }
}
