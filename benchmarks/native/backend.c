/* An engine that does nothing: answers POSTs with bodies of a given size, so that a router's own cost is what is seen.
 *
 * backend TICK_US
 *
 * Prints "PORT\n", then serves 127.0.0.1:PORT over HTTP/1.1 with keep-alive until its standard input ends. The
 * request's body says what to answer, as it would to a real engine:
 *   "max_tokens":N                  JSON of N x 64 bytes, with Content-Length
 *   "max_tokens":N,"stream":true    N chunks of 256 bytes, one for every stream at each tick, as the steps of a
 *                                   continuous batch come; chunked
 * Requests must have Content-Length. Anything else is answered with {}.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

enum { MAX_FD = 1 << 16, CHUNK = 256, UNIT = 64, HEAD = 256, IN_START = 1 << 13 };

struct connection {
    char *in;
    size_t have, room;
    const char *out; /* what is left to send of an answer */
    size_t left;
    char *own; /* the answer, where it was made for this request */
    long chunks; /* still to come, -1: none is being streamed */
};

static struct connection *connections[MAX_FD];
static int epoll, highest;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void drop(int fd) {
    struct connection *c = connections[fd];
    connections[fd] = NULL;
    free(c->in);
    free(c->own);
    free(c);
    close(fd);
}

/* Send what is left; 0 where the connection is gone. */
static int flush(int fd) {
    struct connection *c = connections[fd];
    while (c->left) {
        ssize_t sent = send(fd, c->out, c->left, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) {
            struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = fd};
            epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
            return 1;
        }
        if (sent < 0) {
            drop(fd);
            return 0;
        }
        c->out += sent;
        c->left -= (size_t)sent;
    }
    return 1;
}

static int stream_head(int fd, long chunks) {
    static const char head[] = "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                               "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    struct connection *c = connections[fd];
    c->chunks = chunks;
    c->out = head;
    c->left = sizeof head - 1;
    return flush(fd);
}

static int answer(int fd, long units) {
    static const char before[] = "{\"id\":\"cmpl-0\",\"object\":\"text_completion\",\"choices\":[{\"text\":\"";
    static const char after[] = "\"}]}";
    struct connection *c = connections[fd];
    size_t size = (size_t)units * UNIT;
    if (size < sizeof before + sizeof after)
        size = 2;
    free(c->own);
    c->own = malloc(HEAD + size);
    int head = snprintf(c->own, HEAD,
                        "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                        "content-length: %zu\r\ncontent-type: application/json\r\n\r\n",
                        size);
    char *body = c->own + head;
    if (size == 2) {
        memcpy(body, "{}", 2);
    } else {
        memset(body, 'x', size);
        memcpy(body, before, sizeof before - 1);
        memcpy(body + size - (sizeof after - 1), after, sizeof after - 1);
    }
    c->out = c->own;
    c->left = (size_t)head + size;
    return flush(fd);
}

/* The whole requests in the buffer; 0 where the connection is gone. */
static int requests(int fd) {
    struct connection *c = connections[fd];
    while (c->have && !c->left && c->chunks < 0) {
        char *end = memmem(c->in, c->have, "\r\n\r\n", 4);
        if (!end)
            return 1;
        size_t head = (size_t)(end - c->in) + 4, body = 0;
        end[2] = 0;
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        if (length)
            body = strtoul(length + 17, NULL, 10);
        end[2] = '\r';
        if (c->have < head + body)
            return 1;
        char *key = memmem(c->in + head, body, "\"max_tokens\":", 13);
        long units = key ? strtol(key + 13, NULL, 10) : 0;
        int streamed = memmem(c->in + head, body, "\"stream\":true", 13) != NULL;
        memmove(c->in, c->in + head + body, c->have - head - body);
        c->have -= head + body;
        if (!(streamed ? stream_head(fd, units) : answer(fd, units)))
            return 0;
    }
    return 1;
}

static void readable(int fd) {
    struct connection *c = connections[fd];
    for (;;) {
        if (c->have == c->room)
            c->in = realloc(c->in, c->room = c->room ? 2 * c->room : IN_START);
        ssize_t got = recv(fd, c->in + c->have, c->room - c->have, 0);
        if (got < 0 && errno == EAGAIN)
            break;
        if (got <= 0) {
            drop(fd);
            return;
        }
        c->have += (size_t)got;
        if (c->have < c->room)
            break;
    }
    requests(fd);
}

static void tick(void) {
    static char chunk[CHUNK + 8], last[CHUNK + 16];
    if (!*chunk) {
        int head = sprintf(chunk, "%x\r\n", CHUNK);
        memset(chunk + head, 'x', CHUNK);
        memcpy(chunk + head, "data: {\"text\":\"", 15);
        memcpy(chunk + head + CHUNK - 4, "\"}\n\n", 4);
        memcpy(chunk + head + CHUNK, "\r\n", 3);
        sprintf(last, "%s0\r\n\r\n", chunk);
    }
    for (int fd = 0; fd <= highest; fd++) {
        struct connection *c = connections[fd];
        if (!c || c->chunks < 0 || c->left)
            continue;
        c->out = c->chunks > 1 ? chunk : last;
        c->left = strlen(c->out);
        c->chunks = c->chunks > 1 ? c->chunks - 1 : -1;
        if (flush(fd) && c->chunks < 0)
            requests(fd);
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: backend TICK_US\n");
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    long us = atol(argv[1]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 4096))
        die("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec every = {{us / 1000000, us % 1000000 * 1000}, {us / 1000000, us % 1000000 * 1000}};
    timerfd_settime(timer, 0, &every, NULL);
    epoll = epoll_create1(0);
    int watched[] = {0, listener, timer};
    for (int i = 0; i < 3; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = watched[i]};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, watched[i], &event))
            die("epoll_ctl");
    }
    for (;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll, events, 256, -1);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == 0) {
                char byte;
                if (read(0, &byte, 1) <= 0)
                    return 0;
            } else if (fd == timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) > 0)
                    tick();
            } else if (fd == listener) {
                int client = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (client < 0)
                    continue;
                if (client >= MAX_FD)
                    die("too many connections");
                setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                connections[client] = calloc(1, sizeof(struct connection));
                connections[client]->chunks = -1;
                highest = client > highest ? client : highest;
                struct epoll_event event = {.events = EPOLLIN, .data.fd = client};
                epoll_ctl(epoll, EPOLL_CTL_ADD, client, &event);
            } else if (connections[fd]) {
                if (events[i].events & EPOLLOUT) {
                    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
                    epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
                    if (!flush(fd) || !requests(fd))
                        continue;
                }
                if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                    readable(fd);
            }
        }
    }
}
