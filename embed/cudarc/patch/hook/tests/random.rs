//! Random programs that capture, launch and destroy graphs in every way: the contents of all slices
//! are kept on the host, too, and compared.
#![cfg(target_os = "linux")]

mod support;

use std::sync::Arc;

use aquifer_cudarc::{AllocatorExt as _, Capture};
use cudarc::driver::{CudaGraph, CudaSlice, CudaStream};
use support::{FLAGS, Gpu, RELAXED, Raw, address, begin_raw, fill, value_of};

const SEEDS: u64 = 32;
const STEPS: usize = 250;

struct Slice {
    id: usize,
    memory: CudaSlice<u8>,
    /// The stream, by index.
    on: usize,
    /// The value of all bytes, if any was written.
    value: Option<u8>,
    /// Live graphs that write it, although they do not keep it.
    users: usize,
}

enum Graph {
    Cudarc(CudaGraph),
    /// Its launches are seen.
    Announced(aquifer_cudarc::Graph),
    Raw(Raw),
}

struct Captured {
    graph: Graph,
    /// The stream it was captured on.
    on: usize,
    /// What a launch writes: slices by id.
    writes: Vec<(usize, u8)>,
    /// Slices from before that the program keeps for it.
    uses: Vec<usize>,
}

struct Capturing {
    on: usize,
    has_fork: bool,
    announced: Option<Capture<'static>>,
    writes: Vec<(usize, u8)>,
    uses: Vec<usize>,
    is_broken: bool,
    /// Aquifer knows of it. Before that, it may wait for the device, which breaks the capture.
    is_known: bool,
}

struct Program {
    slices: Vec<Slice>,
    graphs: Vec<Captured>,
    capturing: Option<Capturing>,
    streams: Vec<Arc<CudaStream>>,
    made: usize,
    random: u64,
    gpu: Gpu,
}

impl Program {
    fn new(seed: u64) -> Program {
        let gpu = Gpu::new();
        if seed.is_multiple_of(3) {
            gpu.standin.hold_destructors();
        }
        let streams = (0..3).map(|_| gpu.stream()).collect();
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Program { slices: Vec::new(), graphs: Vec::new(), capturing: None, streams, made: 0, random, gpu }
    }

    fn draw(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % end
    }

    /// True if the stream's work is captured now.
    fn captures(&self, on: usize) -> bool {
        let is_part =
            |capturing: &Capturing| capturing.on == on || (capturing.has_fork && (capturing.on + 1) % 3 == on);
        self.capturing.as_ref().is_some_and(is_part)
    }

    /// A new slice with a value, or, on a stream that captures, one that a launch writes.
    fn alloc(&mut self) {
        let (on, value) = (self.draw(3), self.draw(200) as u8 + 1);
        let bytes = [1000, 300_000, 1 << 20, 3 << 20][self.draw(4)] + self.draw(1000);
        // SAFETY: it is written before it is read.
        let memory = unsafe { self.streams[on].alloc::<u8>(bytes) };
        let captures = self.captures(on);
        let mut memory = match memory {
            Ok(memory) => memory,
            // Its graph is gone already.
            Err(_) if captures && self.capturing.as_ref().is_some_and(|now| now.is_broken) => return,
            Err(error) => panic!("{error}: {}", self.gpu.memory.summary()),
        };
        if let Some(capturing) = self.capturing.as_mut().filter(|_| captures) {
            capturing.is_known = true;
        }
        let id = self.made;
        self.made += 1;
        let mut known = None;
        match self.capturing.as_mut().filter(|_| captures) {
            Some(capturing) if capturing.is_broken => {}
            Some(capturing) => {
                fill(&self.streams[on], &mut memory, value);
                capturing.writes.push((id, value));
            }
            None => {
                fill(&self.streams[on], &mut memory, value);
                known = Some(value);
            }
        }
        self.slices.push(Slice { id, memory, on, value: known, users: 0 });
    }

    /// Drops a slice, wherever its stream's work goes just now.
    fn free(&mut self) {
        if self.slices.is_empty() {
            return;
        }
        let at = self.draw(self.slices.len());
        let captures = self.captures(self.slices[at].on);
        let slice = &mut self.slices[at];
        // Graphs write it, and the program has to keep it for them.
        if slice.users > 0 {
            return;
        }
        if let Some(capturing) = self.capturing.as_mut().filter(|_| captures) {
            if capturing.uses.contains(&slice.id) {
                return;
            }
            capturing.is_known = true;
            if !capturing.is_broken {
                // The last that the graph does with it.
                fill(&self.streams[slice.on], &mut slice.memory, 255);
            }
        }
        self.slices.swap_remove(at);
    }

    /// Captures a write of a slice from before, which the program keeps.
    fn use_outside(&mut self) {
        let value = self.draw(200) as u8 + 1;
        let Some(on) = self.capturing.as_ref().filter(|capturing| !capturing.is_broken).map(|now| now.on) else {
            return;
        };
        let found = self.slices.iter_mut().find(|slice| slice.on == on && slice.value.is_some());
        let (Some(slice), Some(capturing)) = (found, &mut self.capturing) else { return };
        fill(&self.streams[on], &mut slice.memory, value);
        capturing.writes.push((slice.id, value));
        if !capturing.uses.contains(&slice.id) {
            capturing.uses.push(slice.id);
            slice.users += 1;
        }
    }

    fn begin(&mut self) {
        let (on, way) = (self.draw(3), self.draw(5));
        if self.capturing.is_some() {
            return;
        }
        let is_known = !matches!(way, 1 | 2);
        let announced = match way {
            0 => Some(self.gpu.memory.begin_capture(&self.streams[on], RELAXED).unwrap()),
            1 | 2 => {
                begin_raw(&self.streams[on]);
                None
            }
            _ => {
                self.streams[on].begin_capture(RELAXED).unwrap();
                None
            }
        };
        let (writes, uses) = (Vec::new(), Vec::new());
        self.capturing = Some(Capturing { on, has_fork: false, announced, writes, uses, is_broken: false, is_known });
    }

    fn fork(&mut self) {
        if let Some(capturing) = self.capturing.as_mut().filter(|now| !now.is_broken && !now.has_fork) {
            let (from, to) = (&self.streams[capturing.on], &self.streams[(capturing.on + 1) % 3]);
            to.join(from).unwrap();
            capturing.has_fork = true;
        }
    }

    fn break_capture(&mut self) {
        if let Some(capturing) = &mut self.capturing
            && capturing.announced.is_none()
        {
            assert!(self.streams[capturing.on].synchronize().is_err());
            capturing.is_broken = true;
        }
    }

    fn end(&mut self) {
        let is_seen = self.draw(2) == 0;
        let Some(capturing) = self.capturing.take() else { return };
        let Capturing { on, has_fork, announced, writes, uses, is_broken, .. } = capturing;
        let stream = &self.streams[on];
        if has_fork && !is_broken {
            stream.join(&self.streams[(on + 1) % 3]).unwrap();
        }
        let graph = match announced {
            Some(capture) => Ok(Graph::Announced(capture.end(FLAGS, ()).unwrap())),
            None if is_seen => stream.end_capture(FLAGS).map(|graph| Graph::Cudarc(graph.unwrap())),
            None => Raw::end(stream).map(|mut graph| {
                graph.instantiate();
                Graph::Raw(graph)
            }),
        };
        assert_eq!(graph.is_err(), is_broken);
        match graph {
            Ok(graph) => self.graphs.push(Captured { graph, on, writes, uses }),
            Err(_) => self.release(&uses),
        }
    }

    fn release(&mut self, uses: &[usize]) {
        self.slices.iter_mut().filter(|slice| uses.contains(&slice.id)).for_each(|slice| slice.users -= 1);
    }

    /// Launches a graph, in the order of all streams.
    fn launch(&mut self) {
        if self.capturing.is_some() || self.graphs.is_empty() {
            return;
        }
        let (at, on) = (self.draw(self.graphs.len()), self.draw(3));
        let captured = &self.graphs[at];
        let on = if matches!(captured.graph, Graph::Cudarc(_)) { captured.on } else { on };
        let stream = &self.streams[on];
        self.streams.iter().filter(|other| !Arc::ptr_eq(other, stream)).for_each(|other| stream.join(other).unwrap());
        match &captured.graph {
            Graph::Cudarc(graph) => graph.launch().unwrap(),
            Graph::Announced(graph) => graph.launch_on(stream).unwrap(),
            Graph::Raw(graph) => graph.launch(stream),
        }
        self.streams.iter().filter(|other| !Arc::ptr_eq(other, stream)).for_each(|other| other.join(stream).unwrap());
        for (id, value) in &captured.writes {
            self.slices.iter_mut().filter(|slice| slice.id == *id).for_each(|slice| slice.value = Some(*value));
        }
    }

    /// Destroys a graph, or a part of it.
    fn destroy(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let (at, part) = (self.draw(self.graphs.len()), self.draw(5));
        if let Graph::Raw(graph) = &mut self.graphs[at].graph {
            match part {
                0 => return graph.destroy_graph(),
                1 if graph.executables() > 1 => return graph.destroy_executable(),
                2 if graph.has_graph() => return graph.instantiate(),
                3 if graph.has_graph() => {
                    let mut clone = graph.clone();
                    clone.instantiate();
                    *graph = clone;
                    return;
                }
                _ => {}
            }
        }
        let gone = self.graphs.swap_remove(at);
        self.release(&gone.uses);
    }

    fn check(&mut self, at: usize) {
        let slice = &self.slices[at];
        if let Some(value) = slice.value.filter(|_| !self.captures(slice.on)) {
            let what = (slice.id, slice.on, address(&slice.memory));
            assert_eq!(value_of(&slice.memory), value, "{what:x?}");
        }
    }

    fn step(&mut self) {
        match self.draw(24) {
            0..6 => self.alloc(),
            6..10 => self.free(),
            10..12 => self.begin(),
            12..14 => self.end(),
            14 => self.use_outside(),
            15 => self.fork(),
            16 if self.draw(4) == 0 => self.break_capture(),
            16..19 => self.launch(),
            19 | 20 if self.capturing.as_ref().is_some_and(|now| !now.is_known) => {}
            19 => self.destroy(),
            20 if self.draw(2) == 0 => drop(self.gpu.memory.empty_cache().unwrap()),
            20 => {
                let on = self.draw(3);
                assert!(self.streams[on].alloc_zeros::<u8>(1 << 30).is_err());
            }
            21 => {
                self.gpu.standin.run_destructors();
                if self.draw(2) == 0 {
                    self.gpu.standin.hold_destructors();
                }
            }
            _ if self.slices.is_empty() => {}
            _ => {
                let at = self.draw(self.slices.len());
                self.check(at);
            }
        }
    }
}

#[test]
fn slices_hold_what_was_written_whatever_way_graphs_are_captured_and_launched() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut program = Program::new(seed);
        for _ in 0..STEPS {
            program.step();
        }
        program.end();
        (0..program.slices.len()).for_each(|at| program.check(at));
        let Program { slices, graphs, streams, gpu, .. } = program;
        drop((graphs, slices, streams));
        gpu.assert_all_is_back();
    }
}
