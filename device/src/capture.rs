//! Graph capture: a stream's work is recorded into a graph instead of being run.

use std::sync::Arc;

use crate::context::Context;
use crate::driver::{Driver, RawGraph};
use crate::error::Result;
use crate::stream::Stream;

/// A capture in progress on one stream. Dropping it ends the capture and throws the graph away.
///
/// Ticks order nothing across its border (invariant T5): recording and waiting through ticks fail on the stream until the
/// capture ends, and what its timeline learned meanwhile is forgotten.
#[derive(Debug)]
pub struct Capture {
    stream: Stream,
    context: Arc<Context>,
    ended: bool,
}

impl Capture {
    pub(crate) fn begin(stream: Stream, context: Arc<Context>) -> Result<Capture> {
        context.driver.begin_capture(stream.raw())?;
        stream.timeline().begin_capture();
        Ok(Capture { stream, context, ended: false })
    }

    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// Those of the driver, for instance when a call in between broke the capture. It has ended all the same.
    pub fn end(mut self) -> Result<Graph> {
        self.finish().map(|raw| Graph { raw, context: self.context.clone() })
    }

    fn finish(&mut self) -> Result<RawGraph> {
        self.ended = true;
        let graph = self.context.driver.end_capture(self.stream.raw());
        self.stream.timeline().end_capture();
        graph
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if !self.ended
            && let Ok(raw) = self.finish()
        {
            drop(Graph { raw, context: self.context.clone() });
        }
    }
}

/// A captured graph, ready to launch.
#[derive(Debug)]
pub struct Graph {
    raw: RawGraph,
    context: Arc<Context>,
}

impl Graph {
    /// Enqueues the graph's work on a stream.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.context.driver.launch_graph(self.raw, stream.raw())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Err(error) = self.context.driver.destroy_graph(self.raw) {
            tracing::debug!(%error, "a graph could not be destroyed");
        }
    }
}
