//! `advise`: what would help a recorded program.

use crate::cli::AdviseArgs;
use crate::commands::story::Story;
use crate::commands::study::advice::advise;
use crate::commands::study::answers::{headline_of, of_recording};
use crate::commands::study::rows::Advice;
use crate::commands::study::{Asked, Case, Study};
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
        let study = Asked::of(session, program).and_then(|asked| Study::of(session, name, program, asked, 0));
        match study {
            Ok(study) => {
                let advice = advise(session, name, program, &study);
                let (profile, asked) = (&study.profile, study.asked.as_ref());
                let answers = of_recording(program, profile, asked);
                session.show(format_args!("{name} {}\n", headline_of(program, profile, asked)))?;
                let is_refused = program.recorded.oom().is_some() || asked.is_some_and(|asked| asked.refused.is_some());
                Story::new(session, true).answers(&answers[..if is_refused { 3 } else { 1 }])?;
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
