//! `demo`: shows on recorded programs why memory runs out while much of it is free, and which
//! options help.

mod compare;
mod play;

use std::path::Path;

use aquifer_trace::input::{self, Program};

use crate::cli::DemoArgs;
use crate::commands::story::Story;
use crate::commands::{out_of_memory, report};
use crate::exit::{Failure, Outcome};
use crate::row::Row;
use crate::session::Session;
use crate::table::in_terminal;
use crate::text::Bytes;
use compare::Compared;
use play::{Exhausted, Moving, PYTORCH, Roomy};

/// The built-in recordings: the first one is explained, all are compared.
const RECORDINGS: [(&str, &[u8]); 2] = [
    ("gnn_random_graphs.trace.gz", include_bytes!("../../../testdata/gnn_random_graphs.trace.gz")),
    ("gpt2_fp32.trace.gz", include_bytes!("../../../testdata/gpt2_fp32.trace.gz")),
];

/// Memory of the small device beyond the program's peak, in percent.
const SPARE_PERCENT: u64 = 2;

/// Runs the command.
///
/// # Errors
/// When a device cannot be opened, the allocator fails for another reason than lack of memory, or
/// standard output cannot be written.
pub fn run(session: &Session, args: &DemoArgs) -> Result<Outcome, Failure> {
    if session.sim().is_none() {
        return run(&session.simulated("demo")?, args);
    }
    if let Some(alone) = session.without_other_programs() {
        // The devices are as large as the demonstration needs, so memory of other programs would
        // be missing.
        session.message("warning: other= has no effect here: the demonstration's devices have no other programs");
        return run(&alone, args);
    }
    let story = &Story::new(session, args.ascii);
    story.say(
        "Five chapters, a few seconds: a recorded program that fragments memory, how it runs out of memory, what it \
         lost by that, what Aquifer makes of the same device, and a comparison.",
    )?;
    let programs = recordings()?;
    let Some(program) = programs.first() else { return Ok(Outcome::Done) };
    let outcomes =
        [roomy(story, program)?, small(story, program)?, moving(story, program)?, compare(story, &programs)?];
    let report = args.report.as_ref().map(|path| report::write(session, &programs, path)).transpose()?;
    next_steps(story)?;
    Ok(outcomes.into_iter().chain(report).max().unwrap_or(Outcome::Done))
}

fn recordings() -> Result<Vec<Program>, Failure> {
    let mut programs = Vec::new();
    for (name, bytes) in RECORDINGS {
        programs.extend(input::read(Path::new(name), bytes)?);
    }
    Ok(programs)
}

/// The help of the keys.
pub(crate) fn help() -> String {
    [Roomy::help(), Exhausted::help(), Moving::help(), Compared::help()].join("\n")
}

fn roomy(story: &Story<'_>, program: &Program) -> Result<Outcome, Failure> {
    let roomy = play::roomy(story.session, program)?;
    story.session.row(&roomy)?;
    let Roomy { segments, pieces, ooms, .. } = roomy;
    let (peak, size, reserved) =
        (Bytes(program.peak_requested_bytes), Bytes(roomy.device_bytes), Bytes(roomy.peak_reserved_bytes));
    if ooms == 0 {
        story.heading(&format!("1. A program that needs {peak} holds {reserved}"))?;
    } else {
        lacks(story, program, PYTORCH, ooms, size);
        story.heading(&format!("1. A program that needs {peak} is refused some of it on a device of {size}"))?;
    }
    let what = program.headers.iter().find(|(key, _)| key == "what").map_or("", |(_, value)| value);
    story.say(&format!(
        "{} is the recording of a PyTorch program: {what}. In {} allocations and frees it never uses more than \
         {peak} at once. Here a model of PyTorch's allocator serves it on a simulated device of {}. It takes a \
         segment from the device when no free block is large enough, cuts blocks from it, and keeps it.",
        program.name,
        program.operations(),
        size,
    ))?;
    story.say(&format!(
        "When it held most, it held {reserved} in {segments} segments for {} of live data:",
        Bytes(roomy.allocated_bytes)
    ))?;
    story.map(&roomy.map)?;
    story.say(&format!(
        "{} are unused segments; {} are in {pieces} pieces between live blocks. Sizes change from step \
         to step here, so a request often fits none of them, and one more segment is taken.",
        Bytes(roomy.unused_segment_bytes),
        Bytes(roomy.piece_bytes)
    ))?;
    Ok(if ooms == 0 { Outcome::Done } else { Outcome::OutOfMemory })
}

fn small(story: &Story<'_>, program: &Program) -> Result<Outcome, Failure> {
    let capacity = small_device(program);
    let exhausted = play::exhausted(story.session, program, capacity)?;
    story.session.row(&exhausted)?;
    let Exhausted { report, event, map, blocks, damaged, served_again, violations, free_bytes, .. } = exhausted;
    let events = program.operations();
    let size = Bytes(capacity);
    let Some(report) = report else {
        story.heading(&format!("2. On a device of {size} it just finishes"))?;
        return Ok(outcome(violations).max(intact(story, program, damaged)));
    };
    let free = Bytes(free_bytes.unwrap_or(0));
    story.heading(&format!("2. On a device of {size} it runs out of memory while {free} are free"))?;
    story.say(&format!(
        "That is {SPARE_PERCENT} % more than it ever uses, and Aquifer serves it here from memory that does not \
         move, either (backing:segments). Unused segments are released when the device is \
         full, but those with a live block in them cannot be. At event {event} of {events} that is not enough:"
    ))?;
    let text = in_terminal(&report.to_string());
    story.session.show(format_args!("{text}\n"))?;
    story.map(&map)?;
    let intact = intact(story, program, damaged);
    if !served_again {
        let requested = Bytes(report.requested);
        story.session.message(format_args!("error: {}: {requested} are refused after all was freed", program.name));
    }
    let none = |count: u64| if count == 0 { "none".to_owned() } else { count.to_string() };
    let (damaged, violations_found) = (none(damaged as u64), none(violations));
    story.heading("3. Nothing is lost")?;
    story.say(&format!(
        "The only effect is an error. Of {blocks} live blocks, each filled with known content before, \
         {damaged} read differently now. When the program has freed its blocks, the {} are {}. The simulated \
         device has checked every access, and found {violations_found} unordered.",
        Bytes(report.requested),
        if served_again { "served" } else { "STILL REFUSED" },
    ))?;
    Ok(outcome(violations).max(intact).max(if served_again { Outcome::Done } else { Outcome::Failed }))
}

fn moving(story: &Story<'_>, program: &Program) -> Result<Outcome, Failure> {
    let capacity = small_device(program);
    let moving = play::moving(story.session, program, capacity)?;
    story.session.row(&moving)?;
    let Moving { report, why_segments, remaps, granules_moved, damaged, violations, peak_reserved_bytes, map, .. } =
        moving;
    let intact = intact(story, program, damaged);
    let mut ended = outcome(violations).max(intact);
    if report.is_some() {
        lacks(story, program, "", 1, Bytes(capacity));
        ended = ended.max(Outcome::OutOfMemory);
    }
    if let Some(why) = why_segments {
        story.heading("4. Memory cannot move on this device")?;
        story.say(&format!(
            "By default memory is mapped in granules, which move to where contiguous addresses are needed. Here \
             that is not possible: {why}. So the program {} as before.",
            if report.is_some() { "runs out of memory" } else { "finishes" },
        ))?;
        return Ok(ended);
    }
    if let Some(report) = report {
        story.heading("4. Even memory that moves does not suffice here")?;
        story.session.show(format_args!("{}\n", in_terminal(&report.to_string())))?;
        return Ok(ended);
    }
    let peak = Bytes(program.peak_requested_bytes);
    story
        .heading(&format!("4. With memory that moves, it finishes there: {} for {peak}", Bytes(peak_reserved_bytes)))?;
    story.say(&format!(
        "That is what happens by default. Memory is mapped in granules, and where no free block is large enough, \
         granules of free blocks that the device is done with move to where contiguous addresses are needed. \
         Here that happened {remaps} times, with {granules_moved} granules of 2 MiB. Live data never moves: {} \
         of its blocks read differently.",
        if damaged == 0 { "none".to_owned() } else { damaged.to_string() },
    ))?;
    if let Some(map) = map {
        story.session.show("When it held most:")?;
        story.map(&map)?;
    }
    Ok(ended)
}

fn compare(story: &Story<'_>, programs: &[Program]) -> Result<Outcome, Failure> {
    story.heading("5. What helps")?;
    let compared = compare::compare(story.session, programs)?;
    compared.iter().try_for_each(|row| story.session.row(row))?;
    story.say(
        "Two recordings under several options: the most memory that each holds on a device with plenty, the \
         smallest device on which it finishes, and how often the driver is called; ratios are relative to the most \
         memory that it uses.",
    )?;
    story.session.show(format_args!("{}\n", compare::tabulate(&compared)))?;
    if let Some(findings) = programs.first().and_then(|program| compare::findings(&program.name, &compared)) {
        story.say(&findings)?;
    }
    Ok(compared.iter().map(Compared::outcome).max().unwrap_or(Outcome::Done))
}

/// Reports that a program lacked memory, which decides the exit code.
fn lacks(story: &Story<'_>, program: &Program, options: &str, ooms: u64, device: Bytes) {
    story.session.message(out_of_memory(&program.name, options, ooms, &format!(" on a device of {device}")));
}

/// The outcome for blocks that did not read as they were written.
fn intact(story: &Story<'_>, program: &Program, damaged: usize) -> Outcome {
    if damaged == 0 {
        return Outcome::Done;
    }
    story.session.message(format_args!("error: {}: {damaged} blocks did not read as written", program.name));
    Outcome::Failed
}

fn next_steps(story: &Story<'_>) -> Result<(), Failure> {
    story.heading("What to try next")?;
    let program = own_name(std::env::var_os("CARGO").is_some(), std::env::args().next());
    let ways = format!("{} ways to run out of memory, the reports, and the ways out", crate::ways::ALL.len());
    let mut text = String::new();
    for (arguments, meaning) in [
        ("fragmentation", "five synthetic programs that fragment memory, under several options"),
        ("oom", &ways),
        ("explain --help", "how to record a program of your own"),
        ("explain snapshot.pickle", "what it uses memory for, why it runs out of it, and what helps"),
        ("report snapshot.pickle", "the same as a page: memory over time, what is alive, what lies where"),
        ("fit --config '' --config backing:segments snapshot.pickle", "the smallest device for it"),
        ("--help", "everything else"),
    ] {
        text += &format!("  {program} {arguments}\n      {meaning}\n");
    }
    story.session.show(text.trim_end())
}

/// The command that runs this program: through cargo, or as the user called it.
fn own_name(by_cargo: bool, called: Option<String>) -> String {
    match called {
        _ if by_cargo => "cargo run --release --".to_owned(),
        Some(name) if !name.is_empty() => name,
        _ => "aquifer-stress".to_owned(),
    }
}

/// A device with little more memory than the program needs.
fn small_device(program: &Program) -> u64 {
    (program.peak_requested_bytes / 100 * (100 + SPARE_PERCENT)).next_multiple_of(2 << 20)
}

fn outcome(violations: u64) -> Outcome {
    if violations == 0 { Outcome::Done } else { Outcome::Violations }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suggested_commands_name_this_program() {
        assert_eq!(own_name(true, Some("target/release/aquifer-stress".to_owned())), "cargo run --release --");
        assert_eq!(own_name(false, Some("./aquifer-stress".to_owned())), "./aquifer-stress");
        assert_eq!(own_name(false, None), "aquifer-stress");
    }

    #[test]
    fn recordings_are_sound() {
        let programs = recordings().unwrap();
        assert_eq!(programs.len(), RECORDINGS.len());
        assert!(programs.iter().all(|program| program.notes.is_empty()));
    }
}
