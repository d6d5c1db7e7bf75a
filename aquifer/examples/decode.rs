//! An inference engine in small: a transformer that decodes many prompts at once, with a CUDA graph
//! for each size of batch and a paged cache of keys and values that grows in place.
//!
//! Prompts join and leave at every step. The engine runs once with graphs and once without, and the
//! tokens are equal. Its own kernels are host implementations, so it runs on a simulated GPU, which
//! stops at any race.
#![expect(clippy::cast_possible_truncation, reason = "tokens, pages and lengths are small")]

use std::collections::hash_map::{Entry, HashMap};
use std::sync::Arc;

use aquifer::buffer::Access;
use aquifer::device::{DeviceError, DevicePtr, HostKernel, KernelMemory, Launch};
use aquifer::memory::{Growable, PoolOptions, PrivatePool};
use aquifer::prelude::*;
use aquifer::{Error, Graph};

const WIDTH: usize = 32;
const LAYERS: usize = 4;
const VOCABULARY: usize = 64;
/// Tokens of a page of the cache.
const PAGE: usize = 16;
/// Pages that a sequence can have.
const PAGES: usize = 5;
/// Numbers of a row of the batch: its token, the length of its sequence, its pages.
const ROW: usize = 2 + PAGES;
const BATCH_MAX: usize = 64;
/// Bytes of a page: keys and values of all layers.
const PAGE_BYTES: u64 = (PAGE * LAYERS * 2 * WIDTH * 4) as u64;
const CACHE_MAX: u64 = 1 << 30;
const CACHE_STEP: u64 = 2 << 20;

fn main() -> Result<(), Error> {
    let prompts = prompts(96);
    let (captured, graphs, growths) = Engine::new(true)?.run(&prompts)?;
    assert_eq!(captured, Engine::new(false)?.run(&prompts)?.0, "graphs change no token");
    let tokens: usize = captured.iter().map(Vec::len).sum();
    println!("{} sequences, {tokens} tokens, {graphs} captures, the cache grew {growths} times", captured.len());
    Ok(())
}

/// A prompt, the step at which it arrives, and how many tokens it ends with.
type Prompt = (Vec<u32>, usize, usize);

fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % below
}

fn prompts(count: usize) -> Vec<Prompt> {
    let mut state = 7;
    let prompt = |_| {
        let len = 1 + random(&mut state, 16);
        let tokens = (0..len).map(|_| random(&mut state, VOCABULARY) as u32).collect();
        (tokens, random(&mut state, 12), len + 1 + random(&mut state, 56))
    };
    (0..count).map(prompt).collect()
}

/// A sequence that is decoded.
struct Sequence {
    number: usize,
    tokens: Vec<u32>,
    /// Tokens that are in the cache.
    done: usize,
    end: usize,
    pages: Vec<u32>,
}

struct Engine {
    memory: Allocator,
    stream: Stream,
    model: Model,
    cache: Growable,
    free_pages: Vec<u32>,
    pages: u32,
    inputs: Buffer<u32>,
    graphs: Option<Graphs>,
}

/// A graph for each size of batch, in one pool.
struct Graphs {
    pool: PrivatePool,
    of_batch: HashMap<usize, Graph<Buffer<u32>>>,
    captured: usize,
}

struct Model {
    embedding: Buffer<f32>,
    to_logits: Buffer<f32>,
    layers: Vec<[Buffer<f32>; 2]>,
}

impl Model {
    fn new(memory: &Allocator, stream: &Stream) -> Result<Model, Error> {
        let mut state = 1;
        let mut matrix = |rows: usize, columns: usize| {
            let values = (0..rows * columns).map(|_| random(&mut state, 2001) as f32 / 4000.0 - 0.25);
            memory.from_slice(&values.collect::<Vec<f32>>(), stream)
        };
        let layer = |_| Ok([matrix(WIDTH, 3 * WIDTH)?, matrix(WIDTH, WIDTH)?]);
        let layers = (0..LAYERS).map(layer).collect::<Result<_, Error>>()?;
        Ok(Model { layers, embedding: matrix(VOCABULARY, WIDTH)?, to_logits: matrix(WIDTH, VOCABULARY)? })
    }

    /// The next token of each row. It enqueues the same work for the same batch, as a graph needs.
    fn step(
        &self,
        inputs: &Buffer<u32>,
        cache: &Growable,
        batch: usize,
        stream: &Stream,
    ) -> Result<Buffer<u32>, Error> {
        let memory = inputs.allocator();
        let mut cache = Buffer::<f32>::of(cache.storage());
        let mut x = memory.alloc::<f32>(batch * WIDTH, stream)?;
        launch("embed", stream, [read(inputs), read(&self.embedding), write(&mut x)], embed(batch))?;
        for (layer, [qkv, out]) in self.layers.iter().enumerate() {
            let qkv = x.matmul(qkv, [batch, WIDTH, 3 * WIDTH], stream)?;
            let mut attended = memory.alloc::<f32>(batch * WIDTH, stream)?;
            let uses = [read(inputs), read(&qkv), write(&mut attended), write(&mut cache)];
            launch("attend", stream, uses, attend(batch, layer))?;
            x.add_assign(&attended.matmul(out, [batch, WIDTH, WIDTH], stream)?, stream)?;
        }
        let logits = x.matmul(&self.to_logits, [batch, WIDTH, VOCABULARY], stream)?;
        let mut next = memory.alloc::<u32>(batch, stream)?;
        launch("pick", stream, [read(&logits), write(&mut next)], pick(batch))?;
        Ok(next)
    }
}

impl Engine {
    fn new(captures: bool) -> Result<Engine, Error> {
        let device = aquifer::open("sim:1GiB,violations=panic")?;
        let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
        let cache = memory.growable(CACHE_MAX, &stream)?; // addresses, and no memory yet
        let inputs = memory.alloc_zeros(BATCH_MAX * ROW, &stream)?;
        let model = Model::new(&memory, &stream)?;
        let pool = memory.create_pool(PoolOptions::default())?;
        let graphs = captures.then(|| Graphs { pool, of_batch: HashMap::new(), captured: 0 });
        Ok(Engine { memory, stream, model, cache, free_pages: Vec::new(), pages: 0, inputs, graphs })
    }

    /// Decodes all prompts. Returns their tokens, the number of captures, and that of growths.
    fn run(mut self, prompts: &[Prompt]) -> Result<(Vec<Vec<u32>>, usize, u64), Error> {
        let mut finished = vec![Vec::new(); prompts.len()];
        let (mut running, mut step): (Vec<Sequence>, usize) = (Vec::new(), 0);
        while finished.iter().any(Vec::is_empty) {
            let arrived = prompts.iter().enumerate().filter(|(_, (_, at, _))| *at == step);
            running.extend(arrived.map(|(number, (tokens, _, end))| Sequence {
                number,
                tokens: tokens.clone(),
                done: 0,
                end: *end,
                pages: Vec::new(),
            }));
            let batch = running.len().min(BATCH_MAX);
            self.decode(&mut running[..batch])?;
            for sequence in running.extract_if(.., |sequence| sequence.tokens.len() == sequence.end) {
                self.free_pages.extend(&sequence.pages);
                finished[sequence.number] = sequence.tokens;
            }
            step += 1;
        }
        Ok((finished, self.graphs.map_or(0, |graphs| graphs.captured), self.cache.bytes() / CACHE_STEP))
    }

    /// Computes the next token of each sequence, and keeps it where the prompt has ended.
    fn decode(&mut self, sequences: &mut [Sequence]) -> Result<(), Error> {
        let batch = sequences.len().next_power_of_two();
        let mut inputs = vec![0; batch * ROW];
        for (sequence, row) in sequences.iter_mut().zip(inputs.chunks_exact_mut(ROW)) {
            if sequence.done % PAGE == 0 {
                sequence.pages.push(self.page()?);
            }
            (row[0], row[1]) = (sequence.tokens[sequence.done], sequence.done as u32 + 1);
            row[2..2 + sequence.pages.len()].copy_from_slice(&sequence.pages);
        }
        let next = self.step(batch, inputs)?;
        for (sequence, next) in sequences.iter_mut().zip(next) {
            sequence.done += 1;
            if sequence.done == sequence.tokens.len() {
                sequence.tokens.push(next);
            }
        }
        Ok(())
    }

    /// A page of the cache, which grows in place.
    fn page(&mut self) -> Result<u32, Error> {
        if let Some(page) = self.free_pages.pop() {
            return Ok(page);
        }
        if u64::from(self.pages + 1) * PAGE_BYTES > self.cache.bytes() {
            self.cache.grow_to(self.cache.bytes() + CACHE_STEP, &self.stream)?;
            // A kernel declares the memory that it touches, so graphs are captured again.
            self.graphs.iter_mut().for_each(|graphs| graphs.of_batch.clear());
        }
        self.pages += 1;
        Ok(self.pages - 1)
    }

    fn step(&mut self, batch: usize, inputs: Vec<u32>) -> Result<Vec<u32>, Error> {
        let Engine { memory, stream, model, cache, inputs: on_device, graphs, .. } = self;
        on_device.slice_mut(..inputs.len()).upload(inputs, stream)?; // after earlier launches
        let Some(Graphs { pool, of_batch, captured }) = graphs else {
            return model.step(on_device, cache, batch, stream)?.to_vec(stream);
        };
        let graph = match of_batch.entry(batch) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                *captured += 1;
                new.insert(memory.graph_in(pool, stream, |stream| model.step(on_device, cache, batch, stream))?)
            }
        };
        graph.launch(stream)?;
        graph.output().to_vec(stream)
    }
}

/// Device memory, as the host implementation of a kernel sees it.
struct Host<'a>(&'a mut dyn KernelMemory);

impl Host<'_> {
    fn read<T: bytemuck::Pod>(&self, from: DevicePtr, len: usize) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::zeroed(); len];
        self.0.read(from, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn write<T: bytemuck::Pod>(&mut self, to: DevicePtr, values: &[T]) -> Result<(), DeviceError> {
        self.0.write(to, bytemuck::cast_slice(values))
    }
}

/// Enqueues a kernel of the engine's own, ordered by the memory that it uses.
fn launch<const N: usize>(
    name: &'static str,
    stream: &Stream,
    memory: [Access<'_>; N],
    run: impl Fn(&mut Host<'_>, [DevicePtr; N]) -> Result<(), DeviceError> + Send + Sync + 'static,
) -> Result<(), Error> {
    let places = memory.each_ref().map(Access::ptr);
    let host: HostKernel = Arc::new(move |memory, _| run(&mut Host(memory), places));
    let accesses = memory.iter().map(Access::range).collect();
    let launch = Launch { name, accesses, host: Some(host), ..Launch::default() };
    // SAFETY: there is no device code, and the simulator checks that the kernel touches these
    // ranges alone.
    Ok(with(stream, memory, |stream, _| unsafe { stream.launch(&launch) })?)
}

/// The embedding of each row's token.
fn embed(batch: usize) -> impl Fn(&mut Host<'_>, [DevicePtr; 3]) -> Result<(), DeviceError> {
    move |host, [inputs, embedding, x]| {
        let inputs = host.read::<u32>(inputs, batch * ROW)?;
        let embedding = host.read::<f32>(embedding, VOCABULARY * WIDTH)?;
        let rows = inputs.chunks_exact(ROW).flat_map(|row| embedding[row[0] as usize * WIDTH..].iter().take(WIDTH));
        host.write(x, &rows.copied().collect::<Vec<f32>>())
    }
}

/// Puts each row's key and value into the cache, and attends to those of its sequence.
fn attend(batch: usize, layer: usize) -> impl Fn(&mut Host<'_>, [DevicePtr; 4]) -> Result<(), DeviceError> {
    move |host, [inputs, qkv, attended, cache]| {
        let (inputs, qkv) = (host.read::<u32>(inputs, batch * ROW)?, host.read::<f32>(qkv, batch * 3 * WIDTH)?);
        for (number, (row, qkv)) in inputs.chunks_exact(ROW).zip(qkv.chunks_exact(3 * WIDTH)).enumerate() {
            let (query, key_and_value) = qkv.split_at(WIDTH);
            let place = |token: usize| {
                let page = u64::from(row[2 + token / PAGE]) * PAGE_BYTES;
                cache.offset(page + ((token % PAGE * LAYERS + layer) * 2 * WIDTH * 4) as u64)
            };
            let (mut out, mut sum) = ([0.0; WIDTH], 0.0);
            let len = row[1] as usize; // 0 for a row that fills the batch up
            if len > 0 {
                host.write(place(len - 1), key_and_value)?;
            }
            for token in 0..len {
                let known = host.read::<f32>(place(token), 2 * WIDTH)?;
                let score: f32 = query.iter().zip(&known).map(|(query, key)| query * key).sum();
                sum += score.exp();
                out.iter_mut().zip(&known[WIDTH..]).for_each(|(out, value)| *out += score.exp() * value);
            }
            out.iter_mut().for_each(|out| *out /= f32::max(sum, f32::MIN_POSITIVE));
            host.write(attended.offset((number * WIDTH * 4) as u64), &out)?;
        }
        Ok(())
    }
}

/// The most likely token of each row.
fn pick(batch: usize) -> impl Fn(&mut Host<'_>, [DevicePtr; 2]) -> Result<(), DeviceError> {
    move |host, [logits, next]| {
        let logits = host.read::<f32>(logits, batch * VOCABULARY)?;
        let best = logits.chunks_exact(VOCABULARY).map(|row| {
            let best = row.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
            best.map_or(0, |(token, _)| token as u32)
        });
        host.write(next, &best.collect::<Vec<u32>>())
    }
}
