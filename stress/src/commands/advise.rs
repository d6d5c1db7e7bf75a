//! `advise`: what would help a recorded program.

use aquifer_trace::profile::Profile;

use crate::cli::AdviseArgs;
use crate::commands::story::Story;
use crate::commands::study::advice::advise;
use crate::commands::study::answers::{headline_of, of_recording};
use crate::commands::study::rows::Advice;
use crate::commands::study::{Case, Study, asked_bytes};
use crate::commands::{all_programs, failed, on_simulator};
use crate::exit::{Failure, Outcome};
use crate::map::Style;
use crate::row::row;
use crate::session::Session;
use crate::text::wrap;

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &AdviseArgs) -> Result<Outcome, Failure> {
    session.config()?;
    let simulated = on_simulator(session, "advise")?;
    let session = simulated.as_ref().unwrap_or(session);
    let mut outcome = Outcome::Done;
    for (name, program) in &all_programs(session, &args.recordings.files, &mut outcome) {
        match Study::of(session, name, program, Profile::of(program), 0) {
            Ok(study) => {
                let advice = advise(session, name, program, &study);
                let profile = &study.profile;
                let answers = of_recording(program, profile, asked_bytes(session));
                session.show(format_args!("{name} {}\n", headline_of(program, profile)))?;
                Story::new(session, true).answers(&answers[..if program.recorded.oom().is_some() { 3 } else { 1 }])?;
                for advice in &advice {
                    session.row(&Advised { trace: name.clone(), advice: advice.clone() })?;
                }
                show(session, &study, &advice)?;
            }
            Err(failure) => failed(session, name, &failure, &mut outcome),
        }
    }
    Ok(outcome)
}

row! {
    /// Options are tried by replaying the program with each, on the device of --device, or else on one
    /// with plenty of memory. An option is advised only if the program finishes there with it. It must
    /// save at least 2 % of what the options of the snapshot hold, or else PyTorch's default options,
    /// unless the program does not finish with these. Changes of the program are found in its events:
    /// arrays that are replaced by larger ones again and again, blocks that outlive their iteration (in
    /// recordings with iterations), streams that use most at different times, and sizes that hardly
    /// repeat.
    ///
    /// JSON keys, per piece of advice
    pub(crate) struct Advised {
        /// the program
        trace: String,
        #[serde(flatten)]
        advice: Advice,
    }
}

/// Writes advice as text.
///
/// # Errors
/// When standard output cannot be written.
pub(super) fn show(session: &Session, study: &Study, advice: &[Advice]) -> Result<(), Failure> {
    if advice.is_empty() {
        let finishes = study.usual().is_none_or(Case::finishes);
        let why = if finishes { "helps: the program needs what it uses" } else { "finishes on this device" };
        return session.show(format_args!("Nothing that was tried {why}.\n"));
    }
    let width = Style::of_stdout(false).width.saturating_sub(4);
    for Advice { title, text, .. } in advice {
        let text: Vec<String> = wrap(text, width).lines().map(|line| format!("    {line}")).collect();
        session.show(format_args!("{title}\n{}\n", text.join("\n")))?;
    }
    Ok(())
}
